"""Where bytes live: a local folder or S3, behind one contract, and how a store is found and outlasted."""
