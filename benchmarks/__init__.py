"""The project beside its peers: `make bench`. README.md says what is measured and how."""
