"""VMs and their providers: requests and releases, lists, closed connections, offers."""
