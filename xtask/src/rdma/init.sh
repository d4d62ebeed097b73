#!/bin/busybox sh
# The first process of the virtual machine of `cargo xtask rdma`. What it runs is /mnt/command, in the host's own root, which is mounted read-only:
# programs, libraries and tools are the host's. What it says and how it ended goes to the folder that is shared as /mnt.

/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev

give_up() {
    echo "cargo xtask rdma, in the machine: $1 failed"
    poweroff -f
}

for module in $(cat /modules); do
    modprobe "$module" || give_up "modprobe $module"
done
options=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o "$options,ro,cache=loose" root /host || give_up "mounting the host's root"
mount -t 9p -o "$options" shared /host/mnt || give_up "mounting the shared folder"
for folder in proc sys dev; do
    mount --move "/$folder" "/host/$folder"
done
mkdir -p /host/dev/shm
mount -t tmpfs tmpfs /host/dev/shm

# Files for a while go to the machine's memory: all else cannot be written.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/dev/shm HOME=/dev/shm
chroot /host /bin/sh /mnt/command >/host/mnt/output 2>&1
echo $? >/host/mnt/status
sync
poweroff -f
