"""The first recipe that `latentline new` writes, from images or from the configuration of another trainer."""
