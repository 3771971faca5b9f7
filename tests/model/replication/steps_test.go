package replication

import "github.com/ashlar-csi/ashlar/tests/model/explore"

// model is a system of some legs, on nodes of their own, with consumers and rules.
type model struct {
	rules
	belts
	legs   int
	at     [2]int // the node of each consumer: that of a leg, or another
	budget budget
}

const (
	controller = "controller:"
	network    = "network:"
)

var (
	consumers = [...]string{"consumer 0:", "consumer 1:"}
	homes     = [...]string{"leg 0:", "leg 1:", "leg 2:"}
)

// next collects the steps from a state.
type next struct {
	*model
	s   *state
	all []explore.Step[state]
}

func (x *next) add(fault bool, who, what string, change func(t *state)) {
	t := *x.s
	change(&t)
	x.all = append(x.all, explore.Step[state]{Who: who, What: what, Fault: fault, To: t})
}

// do is a step of a healthy system.
func (x *next) do(who, what string, change func(t *state)) { x.add(false, who, what, change) }

// may is a step that nobody has to take.
func (x *next) may(who, what string, change func(t *state)) { x.add(true, who, what, change) }

// fault is a step that breaks something.
func (x *next) fault(who, what string, change func(t *state)) {
	if x.s.left.faults > 0 {
		x.may(who, what, func(t *state) { t.left.faults--; change(t) })
	}
}

func (m *model) every() set { return set(1<<m.legs - 1) }

func (m *model) start() state {
	s := state{reader: none, left: m.budget}
	s.api = object{claim: 0, gen: 1, current: m.every()}
	for i := range s.legs {
		s.legs[i] = leg{clean: true, to: none}
	}
	for b := range s.truth {
		s.truth[b] = truth{1, 1}
	}
	return s
}

func (m *model) steps(s state) []explore.Step[state] {
	x := &next{model: m, s: &s}
	x.controller()
	for i := range m.legs {
		x.leg(i)
	}
	for n := range s.users {
		x.driver(n)
		x.kernel(n)
		x.power(n)
	}
	if s.late.there {
		x.may(network, "a late write of the object arrives", func(t *state) { t.api = t.late.to; t.changed() })
		x.may(network, "a late write of the object is lost", func(t *state) { t.late = late{} })
	}
	return x.all
}

// controller has claims end, and others begin.
func (x *next) controller() {
	s, a := x.s, &x.s.api
	if a.claim != none && !a.ending && s.left.claims > 0 {
		x.may(controller, "the claim is to end", func(t *state) { t.left.claims--; t.api.ending = true; t.changed() })
	}
	if a.claim != none && a.ending && a.ended&a.current != 0 {
		x.do(controller, "the claim has ended", func(t *state) {
			t.api.claim, t.api.ending, t.api.ended = none, false, 0
			t.changed()
		})
	}
	if a.claim == none {
		for n := range s.users {
			x.may(controller, "the volume is claimed by "+consumers[n], func(t *state) {
				t.api.claim = int8(n)
				t.api.gen++
				t.changed()
			})
		}
	}
}

// leg is what a leg's node does.
func (x *next) leg(i int) {
	s, a, l := x.s, &x.s.api, &x.s.legs[i]
	if c := s.calls[i]; c.there {
		switch {
		case !c.checked:
			x.do(homes[i], "looks at the object, as it is to open", func(t *state) {
				c := &t.calls[i]
				if a.claim != c.from || a.gen != c.gen || a.ending {
					*c = call{}
					return
				}
				c.checked = true
				c.listed = a.current.has(i)
				c.fake = x.Backup && a.current.has(i) && l.sound < a.opened
			})
		default:
			x.do(homes[i], "opens", func(t *state) { x.open(t, i) })
		}
		x.may(network, "a call to open is lost", func(t *state) { t.calls[i] = call{} })
	}
	if a.claim != none && a.ending && !a.ended.has(i) {
		x.do(homes[i], "ends the generation", func(t *state) {
			if x.Fence {
				t.endExport(i)
			}
			t.legs[i].ended = a.gen
			t.api.ended |= one(i)
			t.changed()
		})
	}
	x.fault(homes[i], "loses power", func(t *state) { t.losePower(i) })
	if s.left.backups > 0 && l.gen > 0 {
		x.may(homes[i], "is restored from a backup", func(t *state) {
			t.left.backups--
			t.endExport(i)
			t.calls[i] = call{}
			t.legs[i] = leg{clean: true, to: none}
		})
	}
}

func (s *state) losePower(i int) {
	s.endExport(i)
	l := &s.legs[i]
	l.cache = l.stable
	l.weak = !l.clean
	s.calls[i] = call{}
}

func (x *next) open(t *state, i int) {
	c, l := t.calls[i], &t.legs[i]
	t.calls[i] = call{}
	if c.fake || l.gen > c.gen || x.EndStays && l.ended >= c.gen {
		return
	}
	u := &t.users[c.from]
	if x.Fence {
		t.endExport(i)
	}
	before, clean, weak := l.sound, l.clean, l.weak
	l.gen, l.clean, l.to = c.gen, false, c.from
	if c.listed || !x.Sound {
		l.sound = c.gen
	}
	if !c.waits {
		return
	}
	if u.staged { // it comes back to the mirror
		p := part{kind: syncing}
		all := x.Word && before < t.api.word[i]
		for b := range u.dirty {
			u.dirty[b] = u.dirty[b] || x.Union && l.dirty[b] || all
		}
		u.part[i] = p
		return
	}
	u.opened |= one(i)
	u.clean &^= one(i)
	u.weak &^= one(i)
	if clean {
		u.clean |= one(i)
	}
	if weak {
		u.weak |= one(i)
	}
	u.part[i] = part{}
}

// power is the loss of power of a consumer's node, whose leg loses it too.
func (x *next) power(n int) {
	if u := &x.s.users[n]; u.staged || u.doing != idle {
		x.fault(consumers[n], "the node loses power", func(t *state) {
			t.gone(n)
			if at := x.at[n]; at < x.legs {
				t.losePower(at)
			}
		})
	}
}

// write changes the object by compare-and-swap. It may be late, and its answer lost.
func (x *next) write(n int, what string, to object, then func(t *state)) {
	x.do(consumers[n], what, func(t *state) {
		t.api = to
		t.changed()
		then(t)
	})
	if !x.s.late.there {
		x.fault(consumers[n], what+", and has no answer", func(t *state) { t.late = late{true, to} })
	}
}

// driver is what the kubelet has a consumer's driver do, and what it does for the mirror.
func (x *next) driver(n int) {
	s, a, u, who := x.s, &x.s.api, &x.s.users[n], consumers[n]
	mine := a.claim == int8(n) && !a.ending && (!u.staged && u.doing == idle || u.gen == a.gen)
	if !u.staged {
		x.stage(n, mine)
		return
	}
	if u.write.value == 0 && (!mine || s.left.claims > 0) && u.doing == idle {
		x.add(mine, who, "is to unstage", func(t *state) { t.users[n].doing = closing })
	}
	usable := u.usable()
	if u.doing == closing {
		x.close(n)
		return
	}
	if !mine || usable == 0 {
		x.do(who, "unstages by force", func(t *state) { t.gone(n) })
	}
	for i := range x.legs {
		p := u.part[i]
		switch {
		case p.kind == insync && p.failed:
			x.drop(n, i, mine)
		case p.kind == syncing && p.failed:
			x.do(who, "lets go of a leg that is not current", func(t *state) { t.users[n].leave(i) })
		case p.kind == out && !a.current.has(i) && mine && !s.calls[i].there && usable != 0:
			x.do(who, "asks a leg back", func(t *state) {
				t.calls[i] = call{there: true, from: int8(n), gen: u.gen, waits: true}
			})
		case p.kind == insync && !p.failed && !p.dead && !a.current.has(i) && mine:
			x.join(n, i)
		case p.kind == insync && !p.listed && a.current.has(i) && mine:
			x.do(who, "sees that a leg is on the list", func(t *state) { t.users[n].part[i].listed = true })
		}
		if !x.AddLater && p.kind == syncing && !p.failed && !p.dead && !a.current.has(i) && mine {
			x.join(n, i)
		}
	}
}

// stage opens the legs and makes the mirror.
func (x *next) stage(n int, mine bool) {
	s, a, u, who := x.s, &x.s.api, &x.s.users[n], consumers[n]
	if u.doing == opening && (!mine || u.gen != a.gen) {
		x.do(who, "gives up opening", func(t *state) { t.gone(n) })
		return
	}
	if !mine {
		return
	}
	if u.doing == idle {
		x.do(who, "begins to open", func(t *state) { t.users[n] = consumer{doing: opening, gen: a.gen} })
		return
	}
	for i := range x.legs {
		if a.current.has(i) && !u.opened.has(i) && !s.calls[i].there {
			x.do(who, "asks a leg to open", func(t *state) {
				t.calls[i] = call{there: true, from: int8(n), gen: u.gen, waits: true}
			})
		}
	}
	have := u.opened & a.current
	if have == 0 {
		return
	}
	to := *a
	if x.Opened {
		to.opened = u.gen
	}
	begin := func(current set, from int) func(t *state) {
		return func(t *state) {
			u := &t.users[n]
			u.staged, u.doing = true, idle
			for i := range x.legs {
				switch {
				case current.has(i):
					u.part[i].kind, u.part[i].listed = insync, true
					t.api.word[i] = u.gen
				case have.has(i):
					u.part[i].kind = syncing
				}
				if have.has(i) && (x.Union || i == from) {
					for b, d := range t.legs[i].dirty {
						u.dirty[b] = u.dirty[b] || d
					}
				}
				t.legs[i].weak = t.legs[i].weak && !have.has(i)
			}
			weak := have&^u.weak == 0
			u.opened, u.clean, u.weak = 0, 0, 0
			t.reader = int8(n)
			for b := range t.truth {
				r := &t.truth[b]
				if weak {
					r.now = r.after
				}
				if v := uint8(1) << t.legs[from].cache[b]; r.now&v != 0 {
					r.now = v
				}
			}
		}
	}
	if have&^u.clean == 0 || !x.Choose || have&(have-1) == 0 {
		to.current = have
		from := 0
		for !have.has(from) {
			from++
		}
		for i := from; i < x.legs; i++ {
			if have.has(i) && !u.weak.has(i) {
				from = i
				break
			}
		}
		x.write(n, "stages over equal legs", to, begin(have, from))
		return
	}
	for i := range x.legs {
		if have.has(i) && (!u.weak.has(i) || have&^u.weak == 0 || !x.Whole) {
			to := to
			to.current = one(i)
			x.write(n, "stages over one leg, with the others to be made equal", to, begin(one(i), i))
		}
	}
}

// close unmounts, and closes the legs.
func (x *next) close(n int) {
	u, who := &x.s.users[n], consumers[n]
	equal := true
	for i := range x.legs {
		p := u.part[i]
		equal = equal && !(p.kind == insync && (p.failed || p.dead))
	}
	if !u.flush && equal {
		x.do(who, "flushes all legs", func(t *state) {
			for i := range x.legs {
				if t.users[n].part[i].kind == insync && x.CloseFlush {
					t.legs[i].stable = t.legs[i].cache
				}
			}
			t.users[n].flush = true
		})
	}
	if u.flush {
		for i := range x.legs {
			p := u.part[i]
			if p.kind == insync && !p.failed && !p.dead && !x.s.legs[i].clean {
				x.do(who, "closes a leg", func(t *state) { t.legs[i].clean = true })
			}
		}
	}
	x.do(who, "has unstaged", func(t *state) { t.gone(n) })
}

// drop takes a leg that failed off the list, and then out of the mirror.
func (x *next) drop(n, i int, mine bool) {
	a := &x.s.api
	leave := func(t *state) { t.users[n].leave(i) }
	if !x.DropFirst {
		x.do(consumers[n], "lets go of a leg", leave)
		return
	}
	if x.DropOwn && !mine {
		return
	}
	to := *a
	to.current &^= one(i)
	if x.Last && to.current == 0 {
		return // what is equal may have to be put on the list first
	}
	x.write(n, "takes a leg off the list", to, leave)
}

// join puts a leg that is equal on the list.
func (x *next) join(n, i int) {
	u, to := &x.s.users[n], x.s.api
	to.current |= one(i)
	to.word[i] = to.gen
	// Two steps: a loss of power between them ends the export, and the leg has what was flushed.
	if l := &x.s.legs[i]; l.sound != u.gen || x.AddFlush && l.stable != l.cache {
		x.do(consumers[n], "completes a leg that is equal", func(t *state) {
			l := &t.legs[i]
			l.sound = u.gen
			if x.AddFlush {
				l.stable = l.cache
			}
		})
		return
	}
	x.write(n, "puts a leg on the list", to, func(t *state) { t.users[n].part[i].listed = true })
}

func (u *consumer) leave(i int) {
	late := u.part[i].late
	u.part[i] = part{late: late}
	u.write.to &^= one(i)
}

// usable is the legs that have all, and that the kernel can use.
func (u *consumer) usable() (s set) {
	for i, p := range u.part {
		if p.kind == insync && !p.failed {
			s |= one(i)
		}
	}
	return s
}

// kernel is what a consumer's kernel does, and its user.
func (x *next) kernel(n int) {
	s, u, who := x.s, &x.s.users[n], consumers[n]
	for i := range x.legs {
		if p := u.part[i]; p.late[1] != 0 && !p.dead && p.kind == out || p.failed && p.late[1] != 0 && !p.dead {
			x.may(network, "a write arrives late", func(t *state) {
				x.land(t, i, p.late[0], p.late[1])
				t.users[n].part[i].late = [2]int8{}
			})
		}
	}
	if !u.staged {
		return
	}
	for i := range x.legs {
		p := u.part[i]
		if p.kind == out || p.failed {
			continue
		}
		fail := func(t *state) {
			u := &t.users[n]
			q := &u.part[i]
			q.failed = true
			if u.write.to.has(i) && !u.write.done.has(i) && !q.dead {
				q.late = [2]int8{u.write.block, u.write.value}
			}
		}
		if p.dead {
			x.do(who, "the kernel finds that a leg has failed", fail)
		} else {
			x.fault(who, "a leg fails", fail)
		}
	}
	w, usable := u.write, u.usable()
	if w.value == 0 && s.left.writes > 0 && u.doing == idle {
		for b := range int8(blocks) {
			value := x.budget.writes - s.left.writes + 1
			x.may(who, "a block is written", func(t *state) {
				u := &t.users[n]
				t.left.writes--
				u.write = write{value: value, block: b}
				for i, p := range u.part {
					if p.kind != out && !p.failed {
						u.write.to |= one(i)
					}
				}
				t.users[n].dirty[b] = true
				if t.reader == int8(n) {
					v := uint8(1) << value
					t.truth[b].now |= v
					t.truth[b].after |= v
				}
			})
		}
	}
	if w.value != 0 {
		x.writing(n)
	}
	whole := usable != 0
	equal := true // as far as it takes for marks to go
	for i := range x.legs {
		p := u.part[i]
		whole = whole && !(p.kind == insync && (p.failed || p.dead))
		equal = equal && p.kind == insync && !p.failed && (p.listed || !x.ClearList)
	}
	if w.value == 0 && whole && s.reader == int8(n) && s.truth != flushed(s.truth) {
		x.may(who, "all is flushed", func(t *state) {
			for i := range x.legs {
				if t.users[n].part[i].kind == insync {
					t.legs[i].stable = t.legs[i].cache
				}
			}
			t.truth = flushed(t.truth)
		})
	}
	for b := range blocks {
		if w.value != 0 && int(w.block) == b {
			continue
		}
		for i := range x.legs {
			if p := u.part[i]; p.kind == syncing && !p.failed && !p.dead && !p.synced[b] && u.dirty[b] {
				for j := range x.legs {
					if q := u.part[j]; q.kind == insync && !q.failed && !q.dead {
						x.do(who, "the kernel copies what differs", func(t *state) {
							t.users[n].part[i].synced[b] = true
							t.legs[i].dirty[b] = true
							t.legs[i].cache[b] = t.legs[j].cache[b]
						})
						break
					}
				}
			}
		}
		if u.dirty[b] && (equal || !x.ClearAll && whole) {
			x.do(who, "a mark is taken off", func(t *state) { t.users[n].dirty[b] = false })
		}
		for i := range x.legs {
			if p := u.part[i]; p.kind == insync && !p.failed && !p.dead && !u.dirty[b] && s.legs[i].dirty[b] {
				x.do(who, "a mark is taken off a leg", func(t *state) {
					if x.ClearFlush {
						t.legs[i].stable = t.legs[i].cache
					}
					t.legs[i].dirty[b] = false
				})
			}
		}
	}
	for i := range x.legs {
		p := u.part[i]
		if p.kind == syncing && !p.failed && !p.dead && w.value == 0 && p.synced == cover(u.dirty, p.synced) && usable != 0 {
			x.do(who, "a leg is equal", func(t *state) { t.users[n].part[i].kind = insync })
		}
	}
}

// cover is all that is dirty, and what was synced beside it.
func cover(dirty, synced [blocks]bool) [blocks]bool {
	for b := range synced {
		synced[b] = synced[b] || dirty[b]
	}
	return synced
}

func flushed(all [blocks]truth) [blocks]truth {
	for b, t := range all {
		all[b] = truth{t.now, t.now}
	}
	return all
}

// land is a write that reaches a leg, which marks the block before.
func (x *next) land(t *state, i int, b, value int8) {
	t.legs[i].dirty[b] = t.legs[i].dirty[b] || x.MarkFirst
	t.legs[i].cache[b] = value
}

// writing is what becomes of a write.
func (x *next) writing(n int) {
	u, who := &x.s.users[n], consumers[n]
	w := u.write
	ack, held := u.usable() != 0, false
	for i := range x.legs {
		p := u.part[i]
		if p.kind == out {
			continue
		}
		if p.failed {
			held = held || p.kind == insync
			continue
		}
		if w.done.has(i) || !w.to.has(i) {
			continue
		}
		ack = false
		if !p.dead {
			x.do(who, "the write is on a leg", func(t *state) {
				x.land(t, i, w.block, w.value)
				t.users[n].write.done |= one(i)
			})
		}
	}
	if ack && (!held || !x.Hold) {
		x.do(who, "the write is acknowledged", func(t *state) {
			t.users[n].write = write{}
			for i, p := range u.part {
				if !x.MarkFirst && p.kind != out && !p.failed && !p.dead {
					t.legs[i].dirty[w.block] = true
				}
			}
			if t.reader == int8(n) {
				t.truth[w.block].now = 1 << w.value
			}
		})
	}
}

// wrong is what is wrong with a state.
func (m *model) wrong(s state) string {
	if s.api.current == 0 {
		return nothing
	}
	if s.reader == none {
		return ""
	}
	u := &s.users[s.reader]
	for i, p := range u.part {
		if p.kind != insync || p.failed || p.dead {
			continue
		}
		for b, t := range s.truth {
			if t.now&(1<<s.legs[i].cache[b]) == 0 {
				return reads
			}
		}
	}
	return ""
}

// lost reports whether all that is current is an older copy: the rest is for a person to decide.
func (m *model) lost(s state) bool {
	for i := range m.legs {
		if s.api.current.has(i) && s.legs[i].sound >= s.api.opened {
			return false
		}
	}
	return true
}

// done reports whether all is as it should be: a consumer that has the claim uses all legs, or nobody uses the volume.
func (m *model) done(s state) bool {
	if m.lost(s) {
		return true
	}
	if s.late.there {
		return false
	}
	for i := range m.legs {
		if s.calls[i].there {
			return false
		}
	}
	for n := range s.users {
		u := &s.users[n]
		if s.api.claim != int8(n) {
			if u.staged || u.doing != idle {
				return false
			}
			continue
		}
		if s.api.ending || !u.staged || u.write.value != 0 || s.api.current != m.every() || u.usable() != m.every() || u.dirty != ([blocks]bool{}) {
			return false
		}
		for i := range m.legs {
			if u.part[i].dead || s.legs[i].dirty != ([blocks]bool{}) {
				return false
			}
		}
	}
	return true
}
