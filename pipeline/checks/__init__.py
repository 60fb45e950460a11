"""The data-quality checks of the six assets: what each looks at, and what it found."""
