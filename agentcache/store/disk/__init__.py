"""The tier on disk: folder, index, blobs, writer, leases. Knows no tier above it."""
