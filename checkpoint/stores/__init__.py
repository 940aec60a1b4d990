"""Where bytes live: a local folder, S3 or Azure Blob Storage, behind one contract, and how a store is found
and outlasted."""
