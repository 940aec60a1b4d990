"""How VMs that several jobs want are shared among them: what each claims, and its share."""
