"""The study of choosing a step: does the evaluation choose a good one, where the truth is known?"""
