"""From folders of files to a table of validated samples."""
