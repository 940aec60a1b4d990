"""What users ask for: the job file and its fields, and what is wrong with them, by line and field."""
