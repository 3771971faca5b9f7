package dm

import (
	"fmt"
	"os"
	"time"
)

// A suspension that its process does not live to the end of is undone by the kernel, as when the driver ends, or is killed, while it waits for a disk that does not answer. To a mirror that is not undone (drivers/md/dm-raid1.c has no presuspend_undo): what one of its legs
// fails has errors from then on, in place of being held, and the next suspension never ends, until the machine starts anew. So what can take long is waited for before.

const (
	answerPause = 5 * time.Millisecond
	// answerPatience bounds it, as a kernel may count wrong.
	answerPatience = 30 * time.Second
)

// answered waits until the devices below a mirror have answered as much as was under way to them: then a suspension waits for moments. What is no mirror, or cannot be counted, is not waited for. What is held already counts for nothing: it is under way to no device.
func answered(name string) {
	kind, _, err := Target(name)
	if err != nil || kind != "mirror" {
		return
	}
	devices, err := Below(name)
	if err != nil {
		return
	}
	for end := time.Now().Add(answerPatience); len(devices) > 0; devices = devices[1:] {
		asked, before := underWay(devices[0])
		for left := asked; left > 0 && time.Now().Before(end); {
			time.Sleep(answerPause)
			now, ended := underWay(devices[0])
			left = min(now, asked-(ended-before))
		}
	}
}

// underWay is how many requests are under way to a device, and how many have ended, as far as the kernel counts them: Documentation/block/stat.rst.
func underWay(device uint64) (now, ended int64) {
	var reads, writes int64
	text, err := os.ReadFile("/sys/dev/block/" + Number(device) + "/inflight")
	if err != nil {
		return 0, 0
	}
	if _, err := fmt.Sscan(string(text), &reads, &writes); err != nil {
		return 0, 0
	}
	for _, field := range []int{0, 4, 11, 15} { // reads, writes, discards, flushes
		if count, err := counted(device, field); err == nil { // older kernels count fewer
			ended += count
		}
	}
	return reads + writes, ended
}
