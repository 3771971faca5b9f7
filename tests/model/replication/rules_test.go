package replication

// rules are the guards of the protocol (docs/replication.md). Each is there because without it something is lost, or stuck; TestEachRule takes them away one by one.
type rules struct {
	Hold       bool // nothing is acknowledged while a leg that failed is in the mirror
	DropFirst  bool // a leg that was current leaves the mirror only after a write of the object
	Last       bool // the last current leg is never taken off the list
	Fence      bool // a leg ends what it exports before it says that it has ended, and before it exports anew
	Choose     bool // legs that were not closed cleanly may differ: one is chosen, and the others are not current until they are equal
	Whole      bool // a leg that has not lost power is chosen rather than one that has
	Union      bool // what differs is in the bitmap of any leg, not only in that of the one that is copied from
	MarkFirst  bool // a leg marks a block before a write of it is there, not when it is acknowledged
	ClearAll   bool // marks are taken off only while all legs are in the mirror, and equal
	ClearList  bool // and on the list
	ClearFlush bool // by each leg after it has flushed
	AddFlush   bool // a leg is flushed before it is current
	AddLater   bool // and is on the list only once it is equal
	CloseFlush bool // legs are flushed before they are closed
	Opened     bool // the object says for which generation the legs were opened, before anything is written
	Backup     bool // a leg that knows of no such generation is an older copy: it opens for nobody who takes it for current
	Word       bool // and is copied as a whole
	Sound      bool // until it was current again, whatever it is opened for
}

// belts are guards that the protocol has beside others that are enough for all that is modelled: TestBelts takes all of them away.
type belts struct {
	DropOwn  bool // the list is changed by the consumer that has the claim alone, and no more when that is ending
	EndStays bool // a leg does not open for a generation that it has ended
}
