#!/bin/sh
# The first process of a VM: what systemd does there at a boot, which is to run cloud-init's stages in turn.
# SIGTERM is the VM's power button.
trap 'exit 0' TERM
stage() { "$@" & wait $!; }
echo "$1" > /proc/sys/kernel/hostname
stage cloud-init init --local
stage cloud-init init
stage cloud-init modules --mode config
stage cloud-init modules --mode final
while :; do stage sleep 3600; done
