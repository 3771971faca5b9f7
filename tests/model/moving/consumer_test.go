package moving

// kernel is what a consumer's kernel does, and its user.
func (x *next) kernel(n int8) {
	s, u, who := x.s, &x.s.users[n], names[n]
	if !u.staged {
		return
	}
	mirror := u.new.disk != none
	legs := [2]leg{u.old, u.new}
	usable := func(i int) bool { return !legs[i].dead && !legs[i].failed }
	for i, l := range legs {
		if l.disk == none || !mirror || l.failed {
			continue
		}
		fail := func(t *state) {
			if i == 0 {
				t.users[n].old.failed = true
			} else {
				t.users[n].new.failed = true
			}
		}
		if l.dead {
			x.do(who, "the kernel finds that a leg has failed", fail)
		} else {
			x.fault(who, [...]string{"the old leg fails", "the new leg fails"}[i], fail)
		}
	}
	w := s.write
	if w.from == none && s.left.writes > 0 && u.doing != loading {
		for b := range x.blocks {
			x.issue(n, b, x.budget.writes-s.left.writes+1, "writes a block")
			x.issue(n, b, 0, "writes zeros")
		}
	}
	if s.truth != settled(s.truth) && w.from != n && usable(0) && (!mirror || usable(1)) && s.user == n {
		x.may(who, "flushes", func(t *state) {
			for _, l := range legs {
				if l.disk != none {
					t.disks[l.disk].stable = t.disks[l.disk].cache
				}
			}
			t.truth = settled(t.truth)
		})
	}
	for b := range u.synced {
		if mirror && !u.synced[b] && usable(0) && usable(1) && (w.from != n || int(w.block) != b) {
			x.do(who, "the kernel copies a region", func(t *state) {
				t.users[n].synced[b] = true
				t.disks[u.new.disk].cache[b] = t.disks[u.old.disk].cache[b]
			})
		}
	}
	if w.from == n {
		x.writing(n, mirror, legs)
	}
}

// settled is what may be read after a flush.
func settled(all [blocks]truth) [blocks]truth {
	for b, t := range all {
		all[b] = truth{t.believe, t.believe, t.believe}
	}
	return all
}

// issue has the user write. What somebody writes who is not the one who has read the volume last, should reach nothing.
func (x *next) issue(n, block, value int8, what string) {
	x.may(names[n], what, func(t *state) {
		t.left.writes--
		t.write = write{from: n, block: block, value: value}
		if t.user == n {
			v, b := uint8(1)<<value, &t.truth[block]
			b.now, b.safe, b.believe = b.now|v, b.safe|v, b.believe|v
		}
	})
}

// writing is what becomes of a write.
func (x *next) writing(n int8, mirror bool, legs [2]leg) {
	u, w, who := &x.s.users[n], x.s.write, names[n]
	both := mirror && u.synced[w.block]
	needed := [2]bool{true, both}
	var done, failed [2]bool
	for i, l := range legs {
		done[i] = w.done[i] || !needed[i]
		failed[i] = needed[i] && l.failed
		if needed[i] && !w.done[i] && !l.dead && !l.failed {
			x.do(who, [...]string{"the write is on the old leg", "the write is on the new leg"}[i], func(t *state) {
				t.disks[l.disk].cache[w.block] = w.value
				t.write.done[i] = true
			})
		}
	}
	ack := done[0] && done[1] && !failed[0] && !failed[1]
	if !x.Hold && both {
		ack = done[0] && !failed[0] && failed[1] || done[1] && !failed[1] && failed[0] || ack
	}
	if ack {
		x.do(who, "the write is acknowledged", func(t *state) {
			t.write = write{from: none}
			if t.user == n {
				v, b := uint8(1)<<w.value, &t.truth[w.block]
				if b.believe = v; !w.lost {
					b.now = v
				}
			}
		})
	}
	if !mirror && legs[0].dead {
		x.do(who, "the write fails", func(t *state) { t.write = write{from: none} })
	}
}

// node is what the kubelet has the driver of a consumer do, and what that does to move the volume.
func (x *next) node(n int8) {
	s, a, u, who := x.s, &x.s.api, &x.s.users[n], names[n]
	if !u.staged {
		if a.claim == n && u.doing == idle {
			x.send(n, call{what: askOpen, to: a.home, gen: a.gen}, func(t *state) { t.users[n].doing = staging })
			if a.copied && a.of == a.gen {
				x.do(who, "takes the pin away, to stage the volume", func(t *state) { t.uncopy(); t.changed() })
			}
		}
		return
	}
	flipped := u.new.disk != none && a.home == u.new.disk && (x.BackHome || a.claim == n)
	if a.claim != n || u.gen != a.gen && !flipped || u.old.dead && u.new.disk == none {
		x.do(who, "unstages what is of no use any more", func(t *state) { t.unstage(n) })
	} else if s.left.people > 0 {
		x.may(who, "unstages", func(t *state) { t.left.people--; t.unstage(n) })
	}
	moves := a.claim == n && a.gen == u.gen && a.home == u.old.disk && a.move != none && !a.left
	switch u.doing {
	case idle:
		if o := &s.disks[a.home]; moves && !u.old.dead && (o.forGen == 0 || x.stays(a.home)) {
			x.send(n, call{what: askPrepare, to: a.move, gen: u.gen}, func(t *state) {
				if o.forGen != 0 {
					x.unseal(t, a.home)
				}
				word := t.newWord()
				t.users[n].doing = prepare
				for i := range t.calls {
					if c := &t.calls[i]; c.what == askPrepare && c.from == n && c.waits {
						c.word = word
					}
				}
			})
		}
	case connect, loading:
		x.connect(n)
	case follow:
		x.follow(n, moves && a.move == u.new.disk, flipped)
	case complete:
		x.send(n, call{what: askComplete, to: u.new.disk, gen: u.gen, word: u.new.word, seal: u.seal, older: u.older}, func(t *state) { t.users[n].doing = awaiting })
	case look, pinning:
		x.pin(n)
	case pinned:
		x.pinned(n, moves && a.move == u.new.disk, flipped)
	}
}

// connect loads the mirror.
func (x *next) connect(n int8) {
	s, u, who := x.s, &x.s.users[n], names[n]
	to := int8(none)
	for d := range s.disks {
		if e := &s.disks[d]; e.there && e.kind == prepared && e.word == u.word && (e.to == n || int8(d) == n) {
			to = int8(d)
		}
	}
	if to == none || u.old.dead {
		x.do(who, "finds nothing to connect to", func(t *state) { v := &t.users[n]; v.doing, v.word, v.synced = idle, 0, [blocks]bool{} })
		return
	}
	if s.write.from == n && (x.Range || u.doing == loading) {
		return // writes are held, and those that there are waited for
	}
	ranges := func(t *state) {
		for b := range blocks {
			t.users[n].synced[b] = t.disks[u.old.disk].cache[b] == 0
		}
	}
	load := func(t *state) {
		v := &t.users[n]
		v.doing, v.word, v.new = follow, 0, leg{disk: to, word: u.word}
	}
	switch {
	case x.Range:
		x.do(who, "loads the mirror", func(t *state) { ranges(t); load(t) })
	case u.doing == connect:
		x.do(who, "asks for ranges", func(t *state) { ranges(t); t.users[n].doing = loading })
	default:
		x.do(who, "loads the mirror", load)
	}
}

func (u *consumer) good() bool {
	for b := range u.synced {
		if !u.synced[b] {
			return false
		}
	}
	return !u.old.failed && !u.new.failed
}

func (u *consumer) bad() bool { return u.old.failed || u.new.failed }

// follow is a mirror that is not pinned.
func (x *next) follow(n int8, moves, flipped bool) {
	u, who := &x.s.users[n], names[n]
	switch {
	case flipped:
		x.do(who, "goes over to the new leg", func(t *state) { t.goOver(n) })
		return
	case u.bad() || !moves:
		x.do(who, "goes back to the old leg", func(t *state) { t.goBack(n) })
		return
	}
	x.fault(who, "goes back to the old leg, as an old version of the object says", func(t *state) { t.goBack(n) })
	if u.good() {
		x.send(n, call{what: askSeal, to: u.old.disk, gen: u.gen}, func(t *state) { t.users[n].doing, t.users[n].fresh = sealing, true })
	}
}

// pin is the end of the copy.
func (x *next) pin(n int8) {
	u, who := &x.s.users[n], names[n]
	if u.doing == look {
		if x.PinAlive && !u.good() {
			x.do(who, "finds that a leg has failed", func(t *state) { v := &t.users[n]; v.doing, v.seal, v.older, v.fresh = follow, 0, false, false })
			return
		}
		x.do(who, "looks once more", func(t *state) {
			t.users[n].doing = pinning
			if !x.PinOrder {
				t.users[n].fresh = true
			}
		})
		return
	}
	after := func(t *state, sure bool) {
		v := &t.users[n]
		v.doing, v.seal, v.older, v.sure, v.fresh = pinned, 0, false, sure, false
	}
	if u.fresh || !x.PinVersion {
		x.do(who, "pins", func(t *state) { t.pin(u.gen, u.seal); after(t, true) })
		x.fault(who, "pins, and is not told", func(t *state) { t.pin(u.gen, u.seal); after(t, false) })
	} else {
		x.do(who, "cannot pin", func(t *state) { v := &t.users[n]; v.doing, v.seal, v.older = follow, 0, false })
	}
	if !x.s.late.there {
		x.fault(who, "pins, and that is late", func(t *state) {
			t.late = latePin{there: true, fresh: u.fresh, of: u.gen, seal: u.seal}
			after(t, false)
		})
	}
}

// pinned is a mirror that may be pinned.
func (x *next) pinned(n int8, moves, flipped bool) {
	a, u, who := &x.s.api, &x.s.users[n], names[n]
	back := func(t *state) { v := &t.users[n]; v.doing, v.sure = follow, false }
	write := func(t *state) { t.uncopy(); t.changed(); back(t) }
	if flipped || !x.SwitchFlip && u.sure {
		x.do(who, "goes over to the new leg", func(t *state) { t.goOver(n) })
		return
	}
	switch is := a.copied && a.of == u.gen; {
	case is && (u.bad() || !moves || !a.current && x.PinStale):
		if x.Pin {
			x.do(who, "takes the pin away", write)
		} else {
			x.do(who, "goes back to the old leg without a write", func(t *state) { t.goBack(n) })
		}
	case is && !u.sure:
		x.do(who, "finds that it is pinned", func(t *state) { t.users[n].sure = true })
	case is:
	case u.sure || !x.UnsureWrites || x.UnsureOwn && !(a.claim == n && a.gen == u.gen && a.home == u.old.disk):
		x.do(who, "finds that it is not pinned", back)
	default:
		x.do(who, "writes that it is not pinned", write)
	}
}

// goOver loads the table over the new leg alone.
func (s *state) goOver(n int8) {
	u := &s.users[n]
	*u = consumer{staged: true, gen: u.gen + 1, old: leg{disk: u.new.disk, dead: u.new.dead}, new: noLeg}
	if s.write.from == n {
		s.write.done, s.write.lost = [2]bool{}, false
	}
}

// goBack loads the table over the old leg alone, and tells the new home, if it can.
func (s *state) goBack(n int8) {
	u := &s.users[n]
	was := u.new
	*u = consumer{staged: true, gen: u.gen, old: leg{disk: u.old.disk, dead: u.old.dead}, new: noLeg}
	if s.write.from == n {
		s.write.done, s.write.lost = [2]bool{}, false
	}
	for i := range s.calls {
		if s.calls[i].what == nothing {
			s.calls[i] = call{what: askDrop, from: n, to: was.disk, word: was.word, waits: true}
			u.doing, u.word = drop, was.word
			return
		}
	}
}

// wrong is what is wrong with a state.
func (m *model) wrong(s state) string {
	if s.lost {
		if !s.disks[s.api.move].there {
			return "the last bytes are given back"
		}
		return ""
	}
	home := s.api.home
	if s.back {
		switch has := func(d int8) bool { return s.disks[d].there && s.disks[d].kind != prepared && s.acknowledged(d) }; {
		case !has(home) && !has(1-home):
			return "what was written last is gone"
		case s.again && !has(home) && (s.disks[home].gone || !s.down):
			return "the old home, which knows that it is that or can ask, is used"
		}
		return ""
	}
	d := &s.disks[home]
	if !d.there {
		return "the home has no bytes"
	}
	if d.kind == prepared {
		return "the home has a part of the bytes"
	}
	for b, t := range s.truth {
		if t.now&(1<<d.cache[b]) == 0 {
			return "the home has not what was acknowledged"
		}
		if t.safe&(1<<d.stable[b]) == 0 {
			return "the home has not on its disk what was flushed"
		}
	}
	writers := 0
	for n := range s.users {
		u := &s.users[n]
		if !u.staged {
			continue
		}
		for i, l := range []leg{u.old, u.new} {
			if l.disk == none || l.dead || l.failed {
				continue
			}
			if l.disk == home {
				writers++
			}
			for b, t := range s.truth {
				if int8(n) == s.user && s.disks[l.disk].there && (i == 0 || u.synced[b] && !u.old.failed) && t.now&(1<<s.disks[l.disk].cache[b]) == 0 {
					return "the user reads what is not the volume"
				}
			}
		}
	}
	if writers > 1 {
		return "two nodes can write"
	}
	return ""
}

// done reports whether no move is under way, and nothing of one is left.
func (m *model) done(s state) bool {
	if s.lost || s.back { // for a person to decide
		return true
	}
	a := &s.api
	if a.move != none || s.disks[1-a.home].there || s.disks[a.home].kind != whole || s.bring != (bringer{}) || s.late.there || s.write.from != none {
		return false
	}
	for _, c := range s.calls {
		if c.what != nothing {
			return false
		}
	}
	used := false
	for n := range s.users {
		u := &s.users[n]
		if !u.staged {
			continue
		}
		if a.claim != int8(n) || a.gen != u.gen || u.old.disk != a.home || u.old.dead || u.new.disk != none || s.disks[a.home].seal != 0 {
			return false
		}
		used = true
	}
	return used == (a.claim != none) && (used || a.given == none && s.disks[a.home].to == none)
}
