"""How VMs that several jobs want are shared among them: what each claims, its share, and what it gives up."""
