"""The protocol between agents, trainers and the manager.

`messages` defines the messages, `bounds` limits their contents, `frames` reads frames of other versions,
`archives` packs a job's code, `gpus` says which GPUs a process is shown and how much of one is planned with;
the rest are names that both sides must spell alike. Imports nothing of ours, and not torch.
"""
