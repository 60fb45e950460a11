"""Entry point of the command `latentline`, also as `python -m latentline`."""

import sys

from latentline.shadowed import shadowed_packages


def main() -> None:
    """Run the command line and exit, with status 2 if packages of another project shadow Latentline's."""
    problem = shadowed_packages()
    if problem is not None:
        sys.stderr.write(f"Error: {problem}\n")
        sys.exit(2)

    from pipeline.cli.main import main as run_command

    run_command()


if __name__ == "__main__":
    main()
