"""Launchers on other machines, an optional layer: a deployment file names one, and no code imports it.

Each file begins with the systems on which it is tested, and what is not tested.
"""
