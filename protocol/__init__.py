"""What agents, trainers and the manager say to each other.

In: nothing of ours. Out: the messages and the bounds on what they may hold, how a frame of another version is
read, how a job's code is packed, and the few names that both sides must spell alike. Nothing here imports
torch.
"""
