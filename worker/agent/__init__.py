"""The one process of Makara on a VM that talks to the manager: `python -m makara.worker.agent BOOT_FILE`.

In: orders, notices of the cloud, what trainers tell. Out: reports. It fetches the job's code and keeps its
trainers running, one for each device. Nothing here imports torch.
"""
