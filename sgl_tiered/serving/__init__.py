"""One rank of a server, whatever the engine is: see README.md."""
