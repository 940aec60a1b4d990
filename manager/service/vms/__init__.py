"""VMs and providers: requests and releases (`renting`), lists (`watch`), closed connections, offers."""
