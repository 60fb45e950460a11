"""What a user asks of a cache between jobs: is it sound, what would be made, what is in it and for whom."""
