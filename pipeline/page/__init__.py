"""The page of a recipe: its stages, dataset, trainings, previews and results, for the person who trains."""
