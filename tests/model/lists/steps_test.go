package lists

import (
	"math/bits"

	"github.com/ashlar-csi/ashlar/tests/model/explore"
)

const most = 3 // legs

// A set is of legs, as bits.
type set uint8

func (s set) has(i int) bool { return s&(1<<i) != 0 }
func (s set) count() int8    { return int8(bits.OnesCount8(uint8(s))) }

// A state is all that is there.
type state struct {
	api   object
	saved [2]object // backups of it
	saves int8
	legs  [most]leg
	user  user
	last  int8 // what was written last, and acknowledged
	wrong bool
	blind bool // of those that answered when the legs were opened nobody could know better
	left  budget
}

type object struct {
	number  int8
	current set
}

// leg is a leg's record, and what it has of what was written.
type leg struct {
	list, listed, due, after int8
	more                     bool
	has                      int8
}

func (l leg) knows() int8 { return max(l.list, l.after) }

// user has a mirror over legs; its driver may remember the last list.
type user struct {
	there      bool
	in, failed set
	number     int8
	listed     set
}

type next struct {
	*model
	s   *state
	all []explore.Step[state]
}

func (x *next) add(fault bool, what string, change func(t *state)) {
	t := *x.s
	change(&t)
	x.all = append(x.all, explore.Step[state]{What: what, Fault: fault, To: t})
}

func (m *model) every() set { return set(1<<m.legs - 1) }

func (m *model) start() state {
	return state{api: object{current: m.every()}, left: m.budget}
}

func (m *model) steps(s state) []explore.Step[state] {
	x := &next{model: m, s: &s}
	if s.blind || s.wrong {
		return nil
	}
	if l := &s.left; l.saves > 0 {
		x.add(true, "the object is saved", func(t *state) { t.left.saves--; t.saved[t.saves] = t.api; t.saves++ })
	}
	for i := range s.saves {
		if s.left.restores > 0 && s.saved[i] != s.api {
			x.add(true, "the object is put back", func(t *state) { t.left.restores--; t.api = t.saved[i] })
		}
	}
	if s.user.there {
		x.uses()
		x.looks()
	} else {
		x.opens()
	}
	return x.all
}

// uses is what happens to who uses the volume.
func (x *next) uses() {
	s, u := x.s, &x.s.user
	if s.left.ends > 0 {
		x.add(true, "its user ends", func(t *state) { t.left.ends--; t.user = user{} })
	}
	if s.left.starts > 0 && u.number > 0 {
		x.add(true, "its driver starts anew", func(t *state) { t.left.starts--; t.user.number, t.user.listed = 0, 0 })
	}
	if s.left.writes > 0 && u.in&u.failed == 0 {
		x.add(true, "something is written", func(t *state) {
			t.left.writes--
			t.last++
			for i := range x.legs {
				if u.in.has(i) {
					t.legs[i].has = t.last
				}
			}
		})
	}
	for i := range x.legs {
		if s.left.fails > 0 && u.in.has(i) && !u.failed.has(i) && (u.in&^u.failed).count() > 1 {
			x.add(true, "a leg fails", func(t *state) { t.left.fails--; t.user.failed |= 1 << i })
		}
	}
}

// looks is a look of the driver at the mirror.
func (x *next) looks() {
	s, u := x.s, &x.s.user
	failing := u.failed | s.api.current&^u.in
	switch {
	case x.before(s):
		x.putRight(failing)
	case failing != 0:
		x.drops(failing)
	case u.number != s.api.number:
		x.tells(s.api.current)
	default:
		for i := range x.legs {
			switch {
			case u.in.has(i) && !s.api.current.has(i):
				x.lists(s.api.current|1<<i, s.api)
				return
			case !u.in.has(i) && s.left.joins > 0:
				x.add(false, "a leg joins", func(t *state) {
					t.left.joins--
					t.user.in |= 1 << i
					l, knows := &t.legs[i], int8(0)
					for j := range x.legs {
						if u.in.has(j) {
							knows = max(knows, t.legs[j].knows())
						}
					}
					if l.has = t.last; x.Learns && l.knows() < knows {
						l.due, l.after, l.more = max(l.due, knows+1), knows, true
					}
				})
			}
		}
	}
}

// before reports whether the object is of before, as its user sees it.
func (m *model) before(s *state) bool {
	u := &s.user
	if m.Right && (s.api.number < u.number || u.number > 0 && s.api.number == u.number && s.api.current != u.listed) {
		return true
	}
	return m.Recall && (u.number == 0 && s.api.number < s.known() || s.api.current&u.in == 0)
}

// known is the last list that the legs which are written to know of.
func (s *state) known() (number int8) {
	for i, l := range s.legs {
		if (s.user.in &^ s.user.failed).has(i) {
			number = max(number, l.knows())
		}
	}
	return number
}

func (x *next) putRight(failing set) {
	u := x.s.user
	if u.number == 0 {
		u.number = x.s.known()
		for i := range x.legs {
			if u.in.has(i) && u.number > 0 && x.s.legs[i].list == u.number {
				u.listed |= 1 << i
			}
		}
	}
	if names := u.listed & u.in &^ failing; names != 0 {
		x.lists(names, object{u.number, u.listed})
	} else {
		x.ends()
	}
}

// ends is all that is left to who uses the volume when no leg that is current takes what is written.
func (x *next) ends() { x.add(false, "it is taken down", func(t *state) { t.user = user{} }) }

// drops takes legs off the list, and then out of the mirror.
func (x *next) drops(failing set) {
	s, u := x.s, &x.s.user
	rest := s.api.current &^ failing
	leave := func(t *state) { t.user.in &^= failing; t.user.failed = 0 }
	switch {
	case rest == 0:
		x.ends()
	case rest != s.api.current:
		x.lists(rest, s.api)
	case x.Told && u.number != s.api.number:
		x.tells(s.api.current)
	case x.Renews && x.pending():
		x.lists(rest, s.api)
	default:
		x.add(false, "legs that failed leave", leave)
	}
}

// pending reports whether a leg of the list was told that another one is due.
func (x *next) pending() bool {
	for i := range x.legs {
		if x.s.api.current.has(i) && x.s.legs[i].due > x.s.api.number {
			return true
		}
	}
	return false
}

// announced has the records of legs say that a list is due, those up to one of them, and returns its number.
func (x *next) announced(t *state, names set, last object, upTo int) (number int8) {
	more, after := names&^last.current != 0, last.number
	number = max(after, t.api.number) + 1
	for again := true; again; {
		again = false
		for i := range upTo {
			if l := &t.legs[i]; names.has(i) && (l.knows() > after || x.Burns && l.due >= number) {
				again = true
				after = max(after, l.knows())
				number = max(number, l.knows()+1)
				if x.Burns {
					number = max(number, l.due+1)
				}
			}
		}
	}
	for i := range upTo {
		if l := &t.legs[i]; names.has(i) {
			l.due, l.after, l.more = number, after, more
		}
	}
	return number
}

// lists writes a list, after the last one that is known; it may be cut short after some of its legs were told that it is due.
func (x *next) lists(names set, last object) {
	if x.s.left.starts > 0 {
		for i := range x.legs {
			if names.has(i) {
				x.add(true, "a list is announced, and its driver starts anew", func(t *state) {
					t.left.starts--
					x.announced(t, names, last, i+1)
					t.user.number, t.user.listed = 0, 0
				})
			}
		}
	}
	x.add(false, "a list is written", func(t *state) {
		t.api = object{x.announced(t, names, last, x.legs), names}
		if x.Forgets {
			t.user.number, t.user.listed = 0, 0 // until all are told
		}
	})
}

// tells has the legs of the list that is written know that, one after the other.
func (x *next) tells(names set) {
	for i := range x.legs {
		if l := x.s.legs[i]; names.has(i) && (l.list < x.s.api.number || l.due > 0 && l.due <= x.s.api.number) {
			x.add(false, "a leg is told of the list", func(t *state) { t.told(i) })
			return
		}
	}
	x.add(false, "all are told of the list", func(t *state) { t.user.number, t.user.listed = t.api.number, t.api.current })
}

func (s *state) told(i int) {
	l := &s.legs[i]
	if l.list <= s.api.number {
		l.list, l.listed = s.api.number, s.api.current.count()
	}
	if l.due <= l.list {
		l.due, l.after, l.more = 0, 0, false
	}
}

// opens is another user that opens the legs, of which some answer.
func (x *next) opens() {
	all, _ := x.upToDate(x.every())
	for answer := set(1); answer <= x.every(); answer++ {
		latest, _ := x.upToDate(answer)
		for i := range x.legs {
			if !latest.has(i) {
				continue
			}
			if !all.has(i) {
				x.add(true, "the legs are opened, and of those that answer none can tell", func(t *state) { t.blind = true })
				continue
			}
			only := set(1 << i)
			open := func(t *state) {
				t.api = object{x.announced(t, only, t.api, x.legs), only}
			}
			if x.s.left.ends > 0 {
				x.add(true, "the legs are opened, and its user ends before they are told", func(t *state) { t.left.ends--; open(t) })
			}
			x.add(answer != x.every(), "the legs are opened", func(t *state) {
				open(t)
				t.told(i)
				t.user = user{there: true, in: only}
				t.wrong = t.legs[i].has != t.last
			})
		}
	}
}

// upToDate are the legs that may be used, of those that answer; older: one of these tells that the object is of before.
func (x *next) upToDate(answer set) (latest set, older bool) {
	a := x.s.api
	var opened, others set
	for i := range x.legs {
		l := x.s.legs[i]
		switch {
		case !answer.has(i):
		case a.current.has(i) && (l.knows() >= a.number || l.due == a.number):
			opened |= 1 << i
		case !a.current.has(i) && x.Asks && !x.isLast(answer):
			others |= 1 << i
		}
	}
	if opened == 0 {
		return 0, false
	}
	if x.Last && x.forked(opened|others) {
		return 0, true
	}
	number := a.number
	for i := range x.legs {
		if (opened | others).has(i) {
			number = max(number, x.s.legs[i].knows())
		}
	}
	if number == a.number || !x.Number {
		return opened, false
	}
	var members set
	var listed int8
	left := false
	for i := range x.legs {
		if l := x.s.legs[i]; opened.has(i) && l.list == number {
			members |= 1 << i
			listed = l.listed
			left = left || l.more && l.due > number
		}
	}
	if members == 0 || members.count() != listed || left {
		return 0, true
	}
	return members, true
}

// isLast reports whether the legs of the object's list show by themselves that it is the last one: all of them answer, were told of it, and of none that was due after it.
func (x *next) isLast(answer set) bool {
	a := x.s.api
	for i := range x.legs {
		l := x.s.legs[i]
		if a.current.has(i) && (!answer.has(i) || l.list != a.number || l.listed != a.current.count() || l.due > 0) {
			return false
		}
	}
	return true
}

// forked reports whether all legs of the last list that some legs were told of are there, and know of none after it that has one more: then no list has another leg.
func (x *next) forked(of set) bool {
	var members set
	var last, listed int8
	for i := range x.legs {
		if l := x.s.legs[i]; of.has(i) && l.list > last {
			members, last, listed = 0, l.list, l.listed
		}
		if l := x.s.legs[i]; of.has(i) && last > 0 && l.list == last {
			members |= 1 << i
		}
	}
	for i := range x.legs {
		if l := x.s.legs[i]; members.has(i) && (l.more || l.after > last) {
			return false
		}
	}
	return last > 0 && last <= x.s.api.number && members.count() == listed && x.s.api.current&^members != 0
}

// done reports whether all is as it should be, or a person is asked.
func (m *model) done(s state) bool {
	u := &s.user
	if s.blind {
		return true
	}
	x := &next{model: m, s: &s}
	if !u.there {
		latest, _ := x.upToDate(m.every())
		return latest == 0
	}
	return u.failed == 0 && s.api.current == u.in && u.number == s.api.number && u.listed == s.api.current && (u.in == m.every() || s.left.joins == 0)
}
