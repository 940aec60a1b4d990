"""The agent, the process on a VM that talks to the manager: `python -m makara.worker.agent BOOT_FILE`.

In: orders, notices of the cloud, reports of trainers. Out: reports. It fetches the job's code and keeps its
trainers running, one for each device. Nothing here imports torch.
"""
