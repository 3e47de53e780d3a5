"""What those who talk in pairs share: a server with its clients or workers, and peers with each other."""
