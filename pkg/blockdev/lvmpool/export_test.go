package lvmpool

import "github.com/ashlar-csi/ashlar/pkg/blockdev"

// Age makes an LVM pool believe that its last report is old.
func Age(of blockdev.Pool) {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	p.space.at = p.space.at.Add(-lvmFresh)
}

// Copied returns how many bytes of an unfinished copy of an LVM pool are in place.
func Copied(of blockdev.Pool, ref blockdev.Ref) int64 {
	p := of.(*pool)
	p.Mu.Lock()
	defer p.Mu.Unlock()
	if o := p.Objects[ref]; o != nil {
		return o.Copied
	}
	return 0
}

// Few bounds how many ranges LVM pools keep in memory, until undo is called.
func Few(n int) (undo func()) {
	before := mostRanges
	mostRanges = n
	return func() { mostRanges = before }
}
