"""A job on a Ray cluster that runs commands of `latentline` as Ray tasks; the Ray launcher submits it."""
