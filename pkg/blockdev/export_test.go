package blockdev

import "time"

// Abandon makes a file pool believe that nobody came back for an unfinished copy for
// as long as it waits.
func Abandon(pool Pool, ref Ref) {
	p := pool.(*filePool)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.objects[ref].touched = time.Now().Add(-abandonedAfter - time.Second)
}

// Age makes an LVM pool believe that its last report is old.
func Age(pool Pool) {
	p := pool.(*lvmPool)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.space.at = p.space.at.Add(-lvmFresh)
}
