package replication

const (
	none   = -1
	blocks = 2
	most   = 3 // legs
)

// A set is of legs, as bits.
type set uint8

func (s set) has(i int) bool { return s&(1<<i) != 0 }
func one(i int) set          { return 1 << i }

// A state is all that is there: what the API server has, the legs, the consumers, and the calls under way.
type state struct {
	api    object
	legs   [most]leg
	users  [2]consumer
	calls  [most]call
	late   late
	truth  [blocks]truth
	reader int8 // the consumer that staged the volume last; none once it is gone
	left   budget
}

// object is the volume's object.
type object struct {
	claim   int8 // spec.claim: the consumer; none
	gen     int8 // its generation; of the last one, if there is none
	ending  bool // the claim is to go
	current set
	opened  int8 // the generation that the legs were last opened for by a consumer that then read or wrote
	ended   set  // status: legs that admit nobody of this generation any more
	word    [most]int8
}

// leg is what a node has of the volume: its bytes, as they are read and as they outlive a loss of power, its marks, which are written through, and its record.
type leg struct {
	cache  [blocks]int8
	stable [blocks]int8
	dirty  [blocks]bool
	gen    int8 // that it was opened for last
	sound  int8 // of which it was current last: from there on, bitmaps tell what it lacks
	ended  int8 // that it opens for no more
	clean  bool // closed, when it was equal to all legs that were current
	weak   bool // lost power since it was opened, and was not closed before
	to     int8 // the consumer that it is exported to; none
}

// What a leg is to a consumer's kernel.
const (
	out = iota
	syncing
	insync
)

// part is a leg in a consumer's kernel.
type part struct {
	kind   int8
	dead   bool // its export has ended
	failed bool // the kernel has given it up, and holds writes as long as it is there
	listed bool // the driver knows that it is on the list
	synced [blocks]bool
	late   [2]int8 // a write that was given to it before it failed, and may still arrive: block, value; no value: none
}

// What the driver of a consumer does.
const (
	idle = iota
	opening
	closing
)

type consumer struct {
	staged bool
	gen    int8
	doing  int8
	part   [most]part
	dirty  [blocks]bool // what all its legs have marked
	write  write

	opened set // opening: what has answered
	clean  set // and was closed
	weak   set // and has lost power
	flush  bool
}

// write is one that the kernel has and has not acknowledged.
type write struct {
	value int8 // 0: none
	block int8
	to    set // what was in the mirror when it was issued, and still is
	done  set
}

// call is that of a consumer to a leg: open it.
type call struct {
	there   bool
	from    int8
	gen     int8
	waits   bool
	checked bool // the leg's node has asked the API server, and is about to act
	listed  bool // and knows that it is current
	fake    bool // and knows that what it has is older than what the object says
}

// late is a write of the object by a consumer that did not get an answer. It is refused once the object has changed.
type late struct {
	there bool
	to    object
}

// truth is what may be read of a block, as bits of values.
type truth struct {
	now   uint8 // from a leg that has not lost power
	after uint8 // from one that has
}

type budget struct {
	faults, writes, claims, backups int8
}

// changed is after each write of the object.
func (s *state) changed() { s.late = late{} }

// endExport ends what a leg exports: no connection to it lives on.
func (s *state) endExport(i int) {
	s.legs[i].to = none
	for n := range s.users {
		s.users[n].part[i].dead = true
		s.users[n].part[i].late = [2]int8{}
		if s.users[n].part[i].kind == out {
			s.users[n].part[i] = part{}
		}
		s.users[n].opened &^= one(i)
	}
}

// gone is a consumer whose kernel has ended, or let go of the volume.
func (s *state) gone(n int) {
	s.users[n] = consumer{}
	for i := range s.calls {
		if s.calls[i].from == int8(n) {
			s.calls[i].waits = false
		}
	}
	if s.reader == int8(n) {
		s.reader = none
	}
}
