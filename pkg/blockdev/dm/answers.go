package dm

import (
	"slices"
	"time"
)

// The kernel undoes a suspension whose process ends while it waits, as a driver may that is killed while a disk does not answer. dm-mirror does not undo
// its part (drivers/md/dm-raid1.c has no presuspend_undo): from then on what a leg fails has errors in place of being held, and the next suspension never
// ends, until the machine is restarted. So this package waits for what may take long before it suspends a mirror.

const (
	answerPause = 5 * time.Millisecond
	// answerPatience bounds the wait for all devices of a mirror together, as a kernel may count wrong.
	answerPatience = 30 * time.Second
)

// answered waits until each device below a mirror has ended as many requests as were under way to it. A suspension then waits only for moments. It does
// not wait for a device that is no mirror, or whose requests the kernel does not count. What a mirror holds is under way to no device, and so is not
// waited for; nor is that of a mirror that is over another one, which holds it.
func answered(name string) {
	if !isMirror(name) {
		return
	}
	devices, err := Below(name)
	if err != nil {
		return
	}
	inner := mirrorsOf(devices)
	for end := time.Now().Add(answerPatience); len(devices) > 0; devices = devices[1:] {
		asked, before := UnderWay(devices[0])
		for left := asked; left > 0 && time.Now().Before(end) && !slices.ContainsFunc(inner, keepsWrites); {
			time.Sleep(answerPause)
			now, ended := UnderWay(devices[0])
			left = min(now, asked-(ended-before))
		}
	}
}

// UnderWay returns how many requests are under way to a device, and how many have ended since it was made, as far as the kernel counts them:
// Documentation/block/stat.rst. Of a device that is none of the device mapper it does not count flushes that are under way. Of an NVMe namespace with several
// paths a request may count twice in both: for the path, and for the namespace.
func UnderWay(device uint64) (now, ended int64) {
	disks, err := countedBy(device)
	if err != nil {
		return 0, 0
	}
	for _, disk := range disks {
		counts, _ := countsOf(disk)
		for field, count := range counts {
			switch field {
			case 8:
				now += count
			case 0, 4, 11, 15: // reads, writes, discards, flushes; older kernels count fewer
				ended += count
			}
		}
	}
	return now, ended
}
