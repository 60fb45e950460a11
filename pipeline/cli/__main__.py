"""`python -m pipeline.cli`, the command `latentline` where the installed script is not in the path."""

from pipeline.cli.main import main

main()
