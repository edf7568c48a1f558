"""A run on disk: recorder, training loop, writer, manifest, reader, resume, remote."""
