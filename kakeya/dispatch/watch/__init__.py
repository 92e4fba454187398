"""What a node tells of itself and of its fleet while a page watches: facts in sections, each sent
when it changes. Nothing runs and nothing is kept while no page is open."""
