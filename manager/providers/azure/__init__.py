"""VMs of Azure: each is a virtual machine with its interface and disk, all in one resource group.

`provider.py` is the contract; `account.py` speaks with the resource manager through Azure's own client;
`request.py` is what is sent to create a VM; `errors.py` says which of our errors each of Azure's is;
`catalog.py` says what there is (`sizes.py`) and what it costs (`prices.py`). Nothing but `settings.py` is
imported before a section `azure` is found in the manager's settings, for Azure's libraries are an extra.
"""
