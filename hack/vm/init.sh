# shellcheck shell=bash
# What the first process of a virtual machine (boot.sh) begins and ends with. It is sourced there.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
stty -opost
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t tmpfs tmpfs /run && mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit
mountpoint -q /dev || mount -t devtmpfs dev /dev

# Ends the machine.
power_off() {
	sync
	echo b >/proc/sysrq-trigger # without ACPI there is no way to put it off; boot.sh has it end in place of a reset
	sleep infinity
}
