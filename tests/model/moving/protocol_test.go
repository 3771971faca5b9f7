package moving

import "github.com/ashlar-csi/ashlar/tests/model/explore"

// model is a system of nodes 0 (the home, O), 1 (the new home, N), and 2, with rules.
type model struct {
	rules
	belts
	consumer int8   // C
	others   []int8 // whom the claim may be given to later
	blocks   int8   // that are written to
	budget   budget
}

var names = [...]string{"node 0", "node 1", "node 2"}

const (
	people     = "people:"
	controller = "controller:"
	network    = "network:"
)

// next collects the steps from a state.
type next struct {
	*model
	s   *state
	all []explore.Step[state]
}

// do is a step of a healthy system.
func (x *next) do(who, what string, change func(t *state)) {
	t := *x.s
	change(&t)
	x.all = append(x.all, explore.Step[state]{Who: who, What: what, To: t})
}

// may is a step that nobody has to take.
func (x *next) may(who, what string, change func(t *state)) {
	t := *x.s
	change(&t)
	x.all = append(x.all, explore.Step[state]{Who: who, What: what, Fault: true, To: t})
}

// fault is a step that breaks something.
func (x *next) fault(who, what string, change func(t *state)) {
	if x.s.left.faults > 0 {
		x.may(who, what, func(t *state) { t.left.faults--; change(t) })
	}
}

func (m *model) start() state {
	s := state{user: none, left: m.budget}
	s.api = object{home: 0, move: 1, claim: m.consumer, gen: 1, claims: 1, given: none}
	s.disks = [2]disk{{there: true, to: none}, {to: none}}
	for n := range s.users {
		s.users[n] = consumer{old: noLeg, new: noLeg}
	}
	u := &s.users[m.consumer]
	u.staged, u.gen, u.old.disk = true, 1, 0
	if m.consumer != 0 {
		s.disks[0].to, s.disks[0].toGen = m.consumer, 1
		s.api.given, s.api.givenGen = m.consumer, 1
	}
	s.user = m.consumer
	s.write.from = none
	for b := range s.truth {
		s.truth[b] = truth{1, 1, 1}
	}
	return s
}

func (m *model) steps(s state) []explore.Step[state] {
	x := &next{model: m, s: &s}
	if s.lost {
		x.home(s.api.move)
		return x.all
	}
	if s.back {
		x.back()
		return x.all
	}
	x.people()
	x.controller()
	x.network()
	for d := range int8(2) {
		x.home(d)
	}
	x.bring()
	for n := range int8(3) {
		if n == m.consumer || has(m.others, n) || n < 2 {
			x.broken(n)
		}
		if n == m.consumer || has(m.others, n) {
			x.kernel(n)
			x.node(n)
		}
	}
	return x.all
}

func has(all []int8, n int8) bool {
	for _, one := range all {
		if one == n {
			return true
		}
	}
	return false
}

// people ask for moves, and take them back; pods come and go.
func (x *next) people() {
	s, a := x.s, &x.s.api
	if s.left.people > 0 {
		if a.move != none && !a.left {
			x.may(people, "take the move back", func(t *state) { t.left.people--; t.api.move = none; t.changedSpec() })
		}
		if a.move == none {
			x.may(people, "ask for a move to the other home", func(t *state) { t.left.people--; t.api.move = 1 - a.home; t.changedSpec() })
		}
		if a.claim != none {
			x.may(people, "the claim is released", func(t *state) {
				t.left.people--
				t.api.claim, t.api.gen = none, 0
				if x.Release && !(x.ReleaseLeft && a.left) {
					t.uncopy()
				}
				t.changedSpec()
			})
		}
	}
	if s.left.claims > 0 && a.claim == none && a.given == none {
		for _, n := range x.others {
			x.may(people, "the volume is claimed for "+names[n], func(t *state) {
				t.left.claims--
				t.api.claims++
				t.api.claim, t.api.gen = n, t.api.claims
				t.changedSpec()
			})
		}
	}
}

// mayMove: see cluster.MayMove.
func (x *next) mayMove() bool {
	a := &x.s.api
	if a.move == none || a.left || !a.copied || x.FlipCurrent && !a.current {
		return false
	}
	if !x.FlipClaim {
		return true
	}
	if a.claim == none {
		return a.of == 0 && a.given == none
	}
	return a.of == a.gen && (a.given == none || a.givenGen == a.gen)
}

func (x *next) controller() {
	a := &x.s.api
	if x.mayMove() {
		x.do(controller, "the volume is the new node's", func(t *state) {
			t.api.home, t.api.move, t.api.left, t.api.arrived, t.api.cleared = a.move, a.home, true, false, false
			if a.claim != none {
				t.api.claims++
				t.api.gen = t.api.claims
			}
			t.changedSpec()
		})
	}
	if a.left && a.cleared {
		x.do(controller, "the move has ended", func(t *state) {
			t.api.move, t.api.left, t.api.arrived, t.api.cleared = none, false, false, false
			t.uncopy()
			t.changedSpec()
		})
	}
}

// network carries the calls, or does not.
func (x *next) network() {
	s := x.s
	if s.late.there {
		x.do(network, "drops the late pin", func(t *state) { t.late = latePin{} })
		if s.late.fresh || !x.PinVersion {
			x.may(network, "delivers the late pin", func(t *state) {
				late := t.late
				t.late = latePin{}
				t.pin(late.of, late.seal)
			})
		}
	}
	for i := range s.calls {
		c := s.calls[i]
		if c.what == nothing {
			continue
		}
		if c.waits {
			x.fault(names[c.from], "gives up waiting for "+asks[c.what], func(t *state) { t.calls[i].waits = false; t.failed(c) })
		} else if !c.checked {
			x.do(network, "drops a late "+asks[c.what], func(t *state) { t.calls[i] = call{} })
		}
		switch {
		case c.checked:
			x.do(names[c.to], acts[c.what], func(t *state) { x.answer(t, i, false) })
			if c.waits {
				x.fault(names[c.to], lost[c.what], func(t *state) { x.answer(t, i, true) })
			}
		case !x.busy(c.to):
			if x.allowed(c) {
				x.do(names[c.to], checks[c.what], func(t *state) {
					t.calls[i].checked = true
					if c.what == askOpen {
						x.opening(t, c)
					}
				})
			} else {
				x.do(names[c.to], refuses[c.what], func(t *state) { t.calls[i] = call{}; t.failed(c) })
			}
		}
	}
}

var (
	asks    = [...]string{"", "Open", "Prepare", "SealFor", "Complete", "Drop"}
	checks  = words("asks the API server: may ", "")
	acts    = words("carries out ", "")
	lost    = words("carries out ", ", and its answer is lost")
	refuses = words("refuses ", "")
	sends   = words("asks for ", "")
)

func words(before, after string) (all [len(asks)]string) {
	for i, name := range asks {
		all[i] = before + name + after
	}
	return all
}

// busy reports whether a home's lock of the volume is held.
func (x *next) busy(d int8) bool {
	for _, c := range x.s.calls {
		if c.what != nothing && c.to == d && c.checked {
			return true
		}
	}
	return false
}

// send has a consumer ask a home. Where too much is under way it waits.
func (x *next) send(n int8, c call, change func(t *state)) {
	for i := range x.s.calls {
		if x.s.calls[i].what == nothing {
			c.from, c.waits = n, true
			x.do(names[n], sends[c.what], func(t *state) { t.calls[i] = c; change(t) })
			return
		}
	}
}

// failed has the caller find that a call came to nothing.
func (s *state) failed(c call) {
	if !c.waits {
		return
	}
	u := &s.users[c.from]
	switch c.what {
	case askSeal, askComplete:
		u.doing, u.fresh, u.seal, u.older = follow, false, 0, false
	default:
		u.doing, u.word = idle, 0
	}
}

// allowed is what a home asks the API server itself before it does what it is asked.
func (x *next) allowed(c call) bool {
	a, d := &x.s.api, &x.s.disks[c.to]
	claimed := a.claim == c.from && a.gen == c.gen
	switch c.what {
	case askOpen:
		if !claimed || a.home != c.to || !d.there || d.kind != whole || c.from != c.to && x.s.attachedHere(c.to) {
			return false
		}
		return !x.unseals(c) || x.stays(c.to)
	case askPrepare:
		return claimed && a.move == c.to && !a.left
	case askSeal:
		return claimed && a.home == c.to && a.move != none && !a.left
	case askComplete:
		return claimed && a.move == c.to && !a.left
	}
	return a.home != c.to // Drop
}

// unseals reports whether a seal has to be broken for Open.
func (x *next) unseals(c call) bool {
	d := &x.s.disks[c.to]
	same := d.to == c.from && d.toGen == c.gen || c.from == c.to && d.forGen == c.gen
	return d.seal != 0 && (x.SealOpen || !same)
}

// stays: see Agent.Stays.
func (x *next) stays(d int8) bool {
	a := &x.s.api
	return a.home == d && (a.move == none || a.claim != none) && !(x.SealCopied && a.copied && a.claim != none && a.of == a.gen)
}

// opening is what Open writes into the object.
func (x *next) opening(t *state, c call) {
	if x.unseals(c) {
		x.unseal(t, c.to)
	}
	if c.from != c.to && (t.api.given != c.from || t.api.givenGen != c.gen) {
		t.api.given, t.api.givenGen = c.from, c.gen
		t.changed()
	}
}

// unseal breaks a seal. What was pinned with it, or is about to be, is void.
func (x *next) unseal(t *state, d int8) {
	if t.disks[d].forGen != 0 && x.SealWrite {
		t.uncopy()
		t.changed()
	}
	t.disks[d].seal, t.disks[d].forGen, t.disks[d].after = 0, 0, 0
}

// answer has a home act, and the caller learn of it.
func (x *next) answer(t *state, i int, lost bool) {
	c := t.calls[i]
	t.calls[i] = call{}
	word, seal, ok := x.act(t, c)
	if lost || !ok {
		t.failed(c)
		return
	}
	if !c.waits {
		return
	}
	u := &t.users[c.from]
	switch c.what {
	case askOpen:
		*u = consumer{staged: true, gen: c.gen, old: leg{disk: c.to}, new: noLeg}
		t.user = c.from
		for b := range t.truth {
			read := uint8(1) << t.disks[c.to].cache[b]
			t.truth[b] = truth{read, t.truth[b].safe | read, read}
		}
	case askPrepare:
		u.doing, u.word = connect, word
	case askSeal:
		u.doing, u.seal, u.older = complete, seal, false
	case askComplete:
		u.doing = look
	case askDrop:
		u.doing, u.word = idle, 0
	}
}

// act is what a home does under its lock.
func (x *next) act(t *state, c call) (word, seal int8, ok bool) {
	d := &t.disks[c.to]
	switch c.what {
	case askOpen:
		if !d.there || d.kind != whole || c.from == c.to && !c.waits {
			return 0, 0, false
		}
		if d.to != none && (d.to != c.from || d.toGen != c.gen) && x.Fence {
			t.endExport(c.to)
		}
		if c.from != c.to {
			d.to, d.toGen = c.from, c.gen
		}
		return 0, 0, true
	case askPrepare:
		return x.prepare(t, c)
	case askSeal:
		if !d.there || d.kind != whole || !(d.to == c.from && d.toGen == c.gen || c.from == c.to && t.attachedHere(c.to)) {
			return 0, 0, false
		}
		if !x.SealStays || d.seal == 0 || d.forGen != c.gen {
			d.seal, d.forGen, d.after = t.newSeal(), c.gen, c.gen
		}
		return 0, d.seal, true
	case askComplete:
		if !d.there || d.kind == whole || x.NameWord && d.word != c.word {
			return 0, 0, false
		}
		if x.CompleteBoot && !(d.to == c.from && d.toGen == c.gen+1 || c.from == c.to && t.attachedHere(c.to)) {
			return 0, 0, false
		}
		if x.CompleteFlush {
			d.stable = d.cache
		}
		if x.CompleteLater && c.older && d.as != 0 && !d.older {
			return 0, 0, false
		}
		d.kind, d.as, d.older = brought, c.seal, c.older
		return 0, 0, true
	}
	if d.there && d.kind != whole && (!x.NameWord || d.word == c.word) && !t.attachedHere(c.to) {
		t.remove(c.to)
	}
	return 0, 0, true
}

// prepare makes an import for a volume in use, and exports it.
func (x *next) prepare(t *state, c call) (word, seal int8, ok bool) {
	d := &t.disks[c.to]
	if d.there && (d.kind == whole || t.attachedHere(c.to)) {
		return 0, 0, false
	}
	if d.there && !x.PrepareAnew && d.kind == prepared && (d.to == c.from && d.toGen == c.gen+1 || c.from == c.to) {
		return d.word, 0, true
	}
	if d.there && x.PrepareLater && d.word > c.word {
		return 0, 0, false
	}
	t.remove(c.to)
	*d = disk{there: true, kind: prepared, word: c.word, to: none}
	if c.from != c.to {
		d.to, d.toGen = c.from, c.gen+1
	}
	return d.word, 0, true
}

// home is what the agent of a home does by itself: it looks at the API server, and acts, while it holds the lock.
func (x *next) home(n int8) {
	d, a, who := &x.s.disks[n], &x.s.api, names[n]
	if x.busy(n) {
		return
	}
	comes := a.move == n && !a.left || a.left && a.home == n
	if d.to != none {
		mine := a.claim == d.to && a.home == n && a.gen == d.toGen
		coming := d.kind != whole && a.move == n && !a.left && a.claim == d.to && a.gen+1 == d.toGen
		if !mine && !coming {
			x.do(who, "ends the export of a claim that has ended", func(t *state) {
				t.endExport(n)
				if a.home == n && !a.left && a.given != none {
					t.api.given, t.api.givenGen = none, 0
					t.changed()
				}
			})
		}
	}
	if a.home == n && (!a.left || a.arrived) && a.given != none && d.to == none {
		x.do(who, "writes that it gives nothing", func(t *state) { t.api.given, t.api.givenGen = none, 0; t.changed() })
	}
	if d.there && d.kind != whole && !x.s.attachedHere(n) {
		if !comes {
			x.do(who, "removes what is unfinished, and not asked for", func(t *state) { t.remove(n) })
		} else if !x.GarbageLive {
			x.fault(who, "removes what is unfinished, and was not asked for in an old version of the object", func(t *state) { t.remove(n) })
		}
	}
	if d.there && d.seal != 0 && a.home == n && a.claim != none && a.claim == x.s.user && x.stays(n) {
		x.do(who, "unseals the volume, whose user changes its record", func(t *state) { x.unseal(t, n) })
	}
	if a.home == n && a.left && !a.arrived && d.there {
		if d.kind == brought && d.as == a.sealed {
			x.do(who, "makes a volume of what was brought", func(t *state) { e := &t.disks[n]; e.kind, e.as, e.word, e.older = whole, 0, 0, false })
		}
		if d.kind == whole {
			x.do(who, "writes that the volume has arrived", func(t *state) {
				t.api.arrived, t.api.given, t.api.givenGen = true, d.to, d.toGen
				t.changed()
			})
		}
	}
	if a.left && a.move == n && d.there && d.seal == a.sealed && !d.gone {
		x.do(who, "notes that the volume has left it", func(t *state) { t.disks[n].gone = true })
	}
	if a.left && a.move == n && !a.cleared {
		asked := !x.DepartAsks || x.s.disks[a.home].there && x.s.disks[a.home].kind == whole
		if d.there && (a.arrived || !x.DepartArrived) && asked && d.seal == a.sealed && !x.s.attachedHere(n) {
			x.do(who, "gives its bytes back", func(t *state) { t.remove(n) })
		}
		if !d.there && a.arrived {
			x.do(who, "writes that it has given its bytes back", func(t *state) { t.api.cleared = true; t.changed() })
		}
	}
}

// back is what the homes do when the API server says again that the volume is on its old one, and that it does not move.
func (x *next) back() {
	home := x.s.api.home
	old, fresh := &x.s.disks[home], &x.s.disks[1-home]
	carried := fresh.kind == brought && fresh.word != 0
	if fresh.there && fresh.kind != whole && !(x.BackKept && carried) {
		x.do(names[1-home], "removes what is unfinished, and not asked for", func(t *state) { t.remove(1 - home) })
	}
	taken := fresh.there && (fresh.kind == whole || carried)
	if old.there && taken && x.BackAsks && !x.s.down && !old.gone {
		x.do(names[home], "asks the new home, which has taken it over, and notes that", func(t *state) { t.disks[home].gone = true })
	}
	if !x.s.down {
		x.fault(names[1-home], "is down, and does not answer", func(t *state) { t.down = true })
	}
	if old.there && !(x.BackLeft && old.gone) && !(x.BackAsks && taken && !x.s.down) && !x.s.again {
		x.do(names[home], "has what it has used", func(t *state) { t.again = true })
	}
}

// bring is the move of a volume that nobody uses.
func (x *next) bring() {
	s, a, b := x.s, &x.s.api, x.s.bring
	may := a.move != none && !a.left && a.claim == none && a.given == none
	if !may {
		if b != (bringer{}) {
			x.do("the new node", "stops bringing", func(t *state) { t.bring = bringer{} })
		}
		return
	}
	n := a.move
	o, d := &s.disks[a.home], &s.disks[n]
	if x.busy(n) || x.busy(a.home) {
		return
	}
	stop := func(t *state) { t.bring = bringer{} }
	here := d.there && d.kind == brought && d.as == b.seal
	switch {
	case b.doing == 0:
		if x.mayMove() || o.to != none || s.attachedHere(a.home) {
			return
		}
		x.do(names[a.home], "seals the volume that nobody uses", func(t *state) {
			e := &t.disks[a.home]
			if e.seal == 0 || e.after != a.claims || x.SealKind && e.forGen != 0 {
				e.seal = t.newSeal()
			}
			e.forGen, e.after = 0, a.claims
			t.bring = bringer{doing: 1, seal: e.seal}
		})
	case o.seal != b.seal:
		x.do(names[n], "finds another seal", stop)
	case b.doing == 1 && here:
		x.do(names[n], "finds all bytes here", func(t *state) { t.bring.doing = 2 })
	case b.doing == 1 && s.attachedHere(n):
	case b.doing == 1:
		x.do(names[n], "copies all bytes", func(t *state) {
			t.remove(n)
			t.disks[n] = disk{there: true, cache: o.cache, stable: o.cache, kind: brought, as: b.seal, to: none}
			t.bring.doing = 2
		})
	case b.doing == 2:
		x.do(names[n], "reads the object", func(t *state) { t.bring.doing, t.bring.fresh = 3, true })
	case b.doing == 3 && !here:
		x.do(names[n], "finds its copy gone", stop)
	case b.doing == 3:
		x.do(names[n], "finds the same seal", func(t *state) { t.bring.doing = 4 })
	case !b.fresh:
		x.do(names[n], "cannot write that all bytes are here", stop)
	default:
		x.do(names[n], "writes that all bytes are here", func(t *state) {
			t.pin(0, b.seal)
			t.bring = bringer{}
		})
	}
}

// pin writes status.move.copied.
func (s *state) pin(of, seal int8) {
	s.api.copied, s.api.current, s.api.of, s.api.sealed = true, true, of, seal
	s.changed()
}

// broken is what fails on a node.
func (x *next) broken(n int8) {
	reset := func(t *state) {
		for i, c := range t.calls {
			if c.what != nothing && c.to == n && c.checked {
				t.calls[i] = call{}
				t.failed(c)
			}
		}
		t.forget(n)
		if t.api.move == n {
			t.bring = bringer{}
		}
	}
	if a := &x.s.api; a.home == n && a.left && a.arrived && x.s.disks[a.move].there {
		x.fault(names[n], "the disk is lost", func(t *state) { t.remove(n); t.lost = true })
	}
	if a := &x.s.api; a.home == n && a.left {
		x.fault("the API server", "goes back to before the flip", func(t *state) {
			t.back = true
			t.api.home, t.api.move, t.api.left = a.move, none, false
		})
	}
	x.fault(names[n], "the driver dies, and starts again", func(t *state) {
		reset(t)
		u := &t.users[n]
		if u.doing, u.fresh, u.sure, u.word, u.seal, u.older = idle, false, false, 0, 0, false; u.new.disk != none {
			u.doing = pinned
		} else {
			u.synced = [blocks]bool{}
		}
	})
	x.fault(names[n], "the power goes, and the machine starts again", func(t *state) {
		reset(t)
		t.unstage(n)
		if n > 1 || !t.disks[n].there {
			return
		}
		d := &t.disks[n]
		for b := range d.cache {
			if d.cache[b] != d.stable[b] {
				t.truth[b].now |= t.truth[b].safe
				t.write.lost = t.write.lost || t.write.from != none && int(t.write.block) == b
			}
		}
		d.cache = d.stable
		if x.Boot {
			t.endExport(n)
		}
	})
}
