"""Preemption notices: how a VM learns that its cloud will take it away.

A watcher on each VM polls the source that the boot file names: a file (local VMs), or the metadata service of
AWS or Azure. In: the source's answers, and SIGTERM if the boot file treats it as a notice. Out: the current
notice, whether the VM is at risk, and an acknowledgement to the cloud once the VM has handed over. A source
that does not answer changes nothing: only an answer withdraws a notice. What follows from a notice is decided
by the manager (`manager.core.rules.notices`).
"""
