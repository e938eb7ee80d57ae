"""The trace store: fragments in a folder or on S3, their manifest, reading, verification and export."""
