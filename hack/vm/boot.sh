#!/usr/bin/env bash
# Becomes a virtual machine that has this machine's root directory, read-only, as its own, and INIT, a program of it, as its first process. It is QEMU, which
# needs neither KVM nor an image. What the machine says comes out of standard output; it ends when the machine does, SIGSTOP freezes it, and SIGKILL
# cuts its power.
#
#   hack/vm/boot.sh INIT [QEMU-ARGUMENT...]
#
# VM_CPUS (default 1) is how many processors it has (each in a socket of its own: a kernel without ACPI sees no other), VM_MEMORY (default 2048M) how much memory, VM_KERNEL another kernel than that of kernel.sh, VM_ARGUMENTS what the kernel is told beside the rest. VM_SHARE is a directory of
# this machine that it can write to: it mounts that with "mount -t 9p -o $VM_SHARE_OPTIONS share DIR", which INIT has in its environment. VM_PRELOAD is a library for QEMU.
set -euo pipefail

kernel=${VM_KERNEL:-$("$(dirname "${BASH_SOURCE[0]}")/kernel.sh")}
init=$1
shift
accel=(-accel tcg,tb-size=512)
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then # KVM without the processor's help (PVM) does not run an ordinary kernel
	accel=(-accel kvm "${accel[@]}") # the second where the first does not work
fi
common=trans=virtio,version=9p2000.L,msize=524288
share=()
[ -z "${VM_SHARE-}" ] || share=(-fsdev "local,id=share,path=$VM_SHARE,security_model=passthrough,multidevs=remap" -device virtio-9p-pci,fsdev=share,mount_tag=share)
# Without KVM, "rep movsb" goes byte by byte, so the processor is one for which nobody uses it; and what is translated is known by its address, so each program has the same ones each time.
exec env ${VM_PRELOAD:+LD_PRELOAD="$VM_PRELOAD"} qemu-system-x86_64 -no-user-config -nodefaults -display none -no-reboot "${accel[@]}" -cpu max,-erms,-fsrm -smp "${VM_CPUS:-1},sockets=${VM_CPUS:-1},cores=1,threads=1" -m "${VM_MEMORY:-2048M}" \
	-chardev stdio,id=out,signal=off -device virtio-serial-pci -device virtconsole,chardev=out \
	-fsdev local,id=root,path=/,security_model=none,multidevs=remap,readonly=on -device virtio-9p-pci,fsdev=root,mount_tag=/dev/root \
	"${share[@]}" "$@" -kernel "$kernel" \
	-append "console=hvc0 quiet loglevel=3 panic=-1 tsc=reliable mitigations=off norandmaps ro rootfstype=9p rootflags=$common,cache=loose init=$init VM_SHARE_OPTIONS=$common,cache=mmap ${VM_ARGUMENTS-}"
