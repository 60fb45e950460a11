"""Parts that are particular to one model family; shared parts are one level up."""
