package moving

import "slices"

// none is no node.
const none = -1

const blocks = 2

// A state is all that is there: what the API server has, the disks of the two homes, the consumers, and messages. It is compared as a whole, so numbers that only
// have to differ (words, seals) are the smallest that are free, and versions are no numbers at all: who has read an object has a flag that every write of the
// object takes away.
type state struct {
	api   object
	disks [2]disk     // of the nodes 0 and 1
	users [3]consumer // the nodes as consumers
	calls [2]call     // between agents
	bring bringer     // the new node's part in a move of a volume that nobody uses
	late  latePin
	write write
	truth [blocks]truth
	lost  bool // the new home has lost what had arrived: there is nothing but what the old one has
	back  bool // the API server went back to before the flip
	down  bool // and then the new home does not answer
	again bool // and the old home has what it has used
	user  int8 // who read the volume last, when it staged it; none: nobody
	left  budget
}

// object is the volume's object.
type object struct {
	home   int8 // spec.nodeName
	move   int8 // spec.move.node; none: no move
	left   bool // spec.move.left
	claim  int8 // spec.claim.node; none: nobody's
	gen    int8 // spec.claim.generation
	claims int8 // spec.claims

	copied   bool // status.move.copied is there
	current  bool // its generation is that of the object: spec has not changed since
	of       int8 // its claim; 0: nobody used it
	sealed   int8 // its seal
	arrived  bool
	cleared  bool
	given    int8 // status.export: the node; none: nothing is given
	givenGen int8
}

// imports of a disk.
const (
	whole    = iota // it is a volume
	prepared        // an unfinished import of a volume in use
	brought         // an unfinished import, all of which is there
)

// disk is what a home has of the volume: its bytes, by block what is read and what outlives a loss of power, and its record.
type disk struct {
	there  bool
	cache  [blocks]int8
	stable [blocks]int8
	kind   int8 // whole, prepared, brought
	word   int8 // what was prepared: when its origin was described, which is its name
	as     int8 // brought: the seal of its origin
	older  bool // its origin was sealed anew since
	to     int8 // label export: the node; none: no export
	toGen  int8
	seal   int8 // label sealed; 0: not sealed
	forGen int8 // of SealFor: the generation whose use goes on; 0: nobody uses it
	after  int8 // of Seal: after how many claims
	gone   bool // label left: the volume has left it, as it knows
}

// leg is a device that a consumer's kernel has: a disk over the network, or its own.
type leg struct {
	disk   int8 // none: there is no such leg
	word   int8 // the name of what was prepared; second leg only
	dead   bool // its export has ended, for good
	failed bool // the mirror has given it up
}

// What the driver of a consumer is about to do.
const (
	idle     = iota
	prepare  // waits for Prepare
	connect  // has what was prepared
	loading  // has asked which ranges hold data
	follow   // has a mirror
	sealing  // has read the object, and waits for SealFor
	complete // has the seal
	awaiting // waits for Complete
	look     // is to look once more
	pinning  // and then to pin
	pinned   // knows of its pin, or has written one and does not know what became of it
	drop     // has taken the mirror away, and waits for Drop
	staging  // waits for Open
)

// consumer is a node's kernel and driver.
type consumer struct {
	staged bool
	gen    int8
	old    leg
	new    leg
	synced [blocks]bool // what is on both legs
	doing  int8
	fresh  bool // the object has not changed since the driver read it
	sure   bool // pinned: it has seen its pin in the object
	word   int8 // of what was prepared, and is not a leg or not one any more
	seal   int8
	older  bool // the volume was sealed anew since
}

// What agents ask of each other.
const (
	nothing = iota
	askOpen
	askPrepare
	askSeal
	askComplete
	askDrop
)

// call is one that is under way; only the server may still know of it.
type call struct {
	what    int8
	from    int8
	to      int8
	gen     int8
	word    int8
	seal    int8
	waits   bool // the caller is there, and waits
	older   bool // of Complete: the volume was sealed anew since
	checked bool // the server has looked at the API server, holds the volume's lock, and is about to act
}

// bringer is N's agent while it brings a volume that nobody uses.
type bringer struct {
	doing int8 // 0 nothing; 1 has the seal; 2 has the bytes; 3 has read the object; 4 has asked for the seal again
	seal  int8
	fresh bool
}

// latePin is a write of status.move.copied that is late.
type latePin struct {
	there bool
	fresh bool
	of    int8
	seal  int8
}

// write is one that a consumer's kernel has and has not acknowledged.
type write struct {
	from  int8 // none: no write
	block int8
	value int8
	done  [2]bool // on the old leg, on the new one
	lost  bool    // a disk that it was on has lost it
}

// truth is what may be read of a block, as bits of values.
type truth struct {
	now     uint8 // by anybody, now
	safe    uint8 // after a loss of power
	believe uint8 // what its user takes for written
}

// budget is what may still happen.
type budget struct {
	faults, writes, people, claims int8
}

// changed is after each write of the object.
func (s *state) changed() {
	for i := range s.users {
		s.users[i].fresh = false
	}
	s.bring.fresh, s.late.fresh = false, false
}

// changedSpec is after each write of its spec.
func (s *state) changedSpec() {
	s.changed()
	s.api.current = false
}

func (s *state) uncopy() {
	s.api.copied, s.api.current, s.api.of, s.api.sealed = false, false, 0, 0
}

// newWord is a word later than all others, which are counted anew from 1.
func (s *state) newWord() int8 {
	all := []*int8{&s.disks[0].word, &s.disks[1].word}
	for i := range s.users {
		all = append(all, &s.users[i].new.word, &s.users[i].word)
	}
	for i := range s.calls {
		all = append(all, &s.calls[i].word)
	}
	slices.SortFunc(all, func(a, b *int8) int { return int(*a) - int(*b) })
	last, count := int8(0), int8(0)
	for _, word := range all {
		if *word != last {
			last = *word
			count++
		}
		if last != 0 {
			*word = count
		}
	}
	return count + 1
}

// newSeal is a time that nothing was sealed at; all others are older.
func (s *state) newSeal() int8 {
	for i := range s.disks {
		s.disks[i].older = s.disks[i].as != 0
	}
	for i := range s.calls {
		s.calls[i].older = s.calls[i].seal != 0
	}
	for i := range s.users {
		s.users[i].older = s.users[i].seal != 0
	}
	used := map[int8]bool{s.api.sealed: true, s.bring.seal: true, s.late.seal: true}
	for _, d := range s.disks {
		used[d.seal], used[d.as] = true, true
	}
	for _, u := range s.users {
		used[u.seal] = true
	}
	for _, c := range s.calls {
		used[c.seal] = true
	}
	return smallest(used)
}

func smallest(used map[int8]bool) int8 {
	for n := int8(1); ; n++ {
		if !used[n] {
			return n
		}
	}
}

// endExport ends what a home exports: no connection to it lives any more.
func (s *state) endExport(d int8) {
	s.disks[d].to, s.disks[d].toGen = none, 0
	for n := range s.users {
		if int8(n) == d {
			continue
		}
		for _, l := range []*leg{&s.users[n].old, &s.users[n].new} {
			if l.disk == d {
				l.dead = true
			}
		}
	}
}

// remove deletes what a node has of the volume.
func (s *state) remove(d int8) {
	s.endExport(d)
	s.disks[d] = disk{to: none}
	for _, l := range []*leg{&s.users[d].old, &s.users[d].new} {
		if l.disk == d {
			l.dead = true
		}
	}
}

// acknowledged reports whether a disk has what was acknowledged.
func (s *state) acknowledged(d int8) bool {
	for b, t := range s.truth {
		if t.now&(1<<s.disks[d].cache[b]) == 0 {
			return false
		}
	}
	return true
}

// attachedHere reports whether a home's own consumer has its disk.
func (s *state) attachedHere(d int8) bool {
	u := s.users[d]
	return u.staged && u.old.disk == d && !u.old.dead || u.new.disk == d && !u.new.dead
}

var noLeg = leg{disk: none}

// unstage takes away what a consumer's kernel has.
func (s *state) unstage(n int8) {
	s.users[n] = consumer{old: noLeg, new: noLeg}
	s.forget(n)
	if s.write.from == n {
		s.write = write{from: none}
	}
	if s.user == n {
		s.user = none
	}
}

// forget has nobody wait for a consumer's calls.
func (s *state) forget(n int8) {
	for i := range s.calls {
		if s.calls[i].from == n {
			s.calls[i].waits = false
		}
	}
}
