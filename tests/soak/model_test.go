package soak

import (
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
)

// An environment is what the model looks at as one: three volumes, of which the first is the
// source of the others, a snapshot and a group. Environments have nothing to do with each other.
//
//	a  an empty volume
//	b  made from the snapshot
//	c  made from a, as it is
//	the snapshot is of a, the group of a and b
const (
	a, b, c = 0, 1, 2
	volumes = 3
	targets = 2
)

// state is what may be true of an environment.
type state struct {
	volumes [volumes]volumeState
	// snapshot and group: the contents of a (and b) when they were made; absent: there is none.
	snapshot, groupA, groupB int32
}

type volumeState struct {
	exists, claimed, staged bool
	// attached: its device is up without being staged: a call was cut short. The next
	// unstage, or start, ends that.
	attached  bool
	published [targets]bool
	content   int32 // number of the last write; 0: none
	size      int8  // in steps
	growing   int8  // size that a call was to grow it to that was cut short; the next one, or start, may do it
}

// first and last are the sizes of the volumes: the copies have room for their source.
var (
	first = [volumes]int8{0, 3, 3}
	last  = [volumes]int8{3, 5, 5}
)

// absent is the content of a snapshot that does not exist.
const absent = -1

// What a read finds where nothing is mounted, and the size after an expand that nobody told.
const (
	nothing = -1
	unknown = -2
)

type kind string

const (
	create      kind = "CreateVolume"
	remove      kind = "DeleteVolume"
	claim       kind = "ControllerPublishVolume"
	release     kind = "ControllerUnpublishVolume"
	stage       kind = "NodeStageVolume"
	unstage     kind = "NodeUnstageVolume"
	publish     kind = "NodePublishVolume"
	unpublish   kind = "NodeUnpublishVolume"
	expand      kind = "ControllerExpandVolume"
	nodeExpand  kind = "NodeExpandVolume"
	modify      kind = "ControllerModifyVolume"
	validate    kind = "ValidateVolumeCapabilities"
	stats       kind = "NodeGetVolumeStats"
	snapshot    kind = "CreateSnapshot"
	unsnapshot  kind = "DeleteSnapshot"
	cutGroup    kind = "CreateVolumeGroupSnapshot"
	removeGroup kind = "DeleteVolumeGroupSnapshot"
	write       kind = "write"
	read        kind = "read"
	restart     kind = "restart"
	observe     kind = "observe"
)

// input is a call.
type input struct {
	kind   kind
	volume int
	target int
	number int32 // of a write; steps of growth of an expand
	// held: somebody has used the data meanwhile, so that the call may be refused.
	held bool
}

// output is its answer.
type output struct {
	code codes.Code
	// maybe: the answer does not say whether it was done, or will be.
	maybe bool
	// number that was read; or the size after an expand.
	number int32
	// seen is what an observation has seen, but for contents.
	seen state
}

// outcomes are the states that a call may lead to that was answered so: none if that
// answer cannot be.
func outcomes(s state, in input, out output) []state {
	if out.maybe {
		// It was not done, or it was, or (below) a part of it.
		all := append([]state{s}, done(s, in, output{number: unknown})...)
		v := &s.volumes[in.volume]
		switch in.kind {
		case stage, unstage, publish:
			if v.exists && !v.staged {
				v.attached = true
				all = append(all, s)
			} else if in.kind == unstage && v.staged && !slices.Contains(v.published[:], true) {
				v.staged, v.attached = false, true
				all = append(all, s)
			}
		case expand:
			if v.exists {
				v.growing = max(v.growing, int8(in.number))
				all = append(all, s)
			}
		}
		return all
	}
	if out.code == codes.OK {
		return done(s, in, out)
	}
	if refused(s, in, out.code) {
		return []state{s}
	}
	return nil
}

// done is what is true after a call that succeeded; nothing if it cannot have.
func done(s state, in input, out output) []state {
	v := &s.volumes[in.volume]
	possible := true
	switch in.kind {
	case create:
		if v.exists {
			break
		}
		*v = volumeState{exists: true, size: first[in.volume]}
		switch in.volume {
		case b:
			possible, v.content = s.snapshot != absent, s.snapshot
		case c:
			possible, v.content = s.volumes[a].exists, s.volumes[a].content
		}
	case remove:
		possible = !v.exists || (!v.claimed && !v.staged && !v.attached)
		*v = volumeState{}
	case claim:
		possible, v.claimed = v.exists, true
	case release:
		v.claimed = false
	case stage:
		possible, v.staged, v.attached = v.exists && v.claimed, true, false
	case unstage:
		possible, v.staged, v.attached = !slices.Contains(v.published[:], true), false, false
	case publish:
		possible, v.published[in.target] = v.staged && v.claimed, true
	case unpublish:
		v.published[in.target] = false
	case expand:
		if possible = v.exists; possible && out.number == unknown {
			v.size = max(v.size, int8(in.number))
			break
		}
		v.size = max(v.size, int8(out.number))
		v.growing = 0
		possible = possible && int(v.size) == int(out.number) && out.number >= in.number
	case nodeExpand, stats:
		// NodeExpandVolume may find it at its staging path instead.
		possible = v.published[in.target] || in.kind == nodeExpand && (v.staged || v.attached)
		if v.growing > v.size {
			grown := s
			grown.volumes[in.volume].size, grown.volumes[in.volume].growing = v.growing, 0
			return only(possible, s, grown)
		}
	case modify, validate:
		possible = v.exists
	case snapshot:
		if s.snapshot == absent {
			possible, s.snapshot = v.exists, v.content
		}
	case unsnapshot:
		s.snapshot = absent
	case cutGroup:
		if s.groupA == absent {
			possible = s.volumes[a].exists && s.volumes[b].exists
			s.groupA, s.groupB = s.volumes[a].content, s.volumes[b].content
		}
	case removeGroup:
		s.groupA, s.groupB = absent, absent
	case write:
		possible, v.content = v.published[in.target], in.number
	case read:
		if possible = v.published[in.target] == (out.number != nothing); possible && out.number != nothing {
			possible = v.content == out.number
		}
	case restart:
		for i := range s.volumes {
			s.volumes[i].attached = false
			if s.volumes[i].growing > s.volumes[i].size {
				s.volumes[i].size = s.volumes[i].growing
			}
			s.volumes[i].growing = 0
		}
	case observe:
		return only(s.looks() == out.seen.looks(), s)
	}
	return only(possible, s)
}

// only is the states if they are possible.
func only(possible bool, all ...state) []state {
	if !possible {
		return nil
	}
	return all
}

// looks is what an observation can see.
func (s state) looks() state {
	for i := range s.volumes {
		s.volumes[i].content, s.volumes[i].attached, s.volumes[i].growing = 0, false, 0
	}
	s.snapshot, s.groupA, s.groupB = min(s.snapshot, 0), min(s.groupA, 0), min(s.groupB, 0)
	return s
}

// refused reports whether a call can have been refused so; then nothing has changed.
func refused(s state, in input, code codes.Code) bool {
	v := s.volumes[in.volume]
	published := slices.Contains(v.published[:], true)
	switch code {
	case codes.NotFound:
		switch in.kind {
		case create:
			return !v.exists && ((in.volume == b && s.snapshot == absent) || (in.volume == c && !s.volumes[a].exists))
		case claim, stage, publish, expand, modify, validate:
			return !v.exists
		case snapshot:
			return !v.exists && s.snapshot == absent
		case nodeExpand:
			return !v.published[in.target] && !v.staged
		case stats:
			return !v.published[in.target]
		case cutGroup:
			return s.groupA == absent && (!s.volumes[a].exists || !s.volumes[b].exists)
		}
	case codes.FailedPrecondition:
		switch in.kind {
		case remove:
			return v.claimed || v.staged || v.attached
		case unstage:
			return published
		case stage:
			return v.exists && !v.claimed
		case publish:
			return v.exists && (!v.staged || !v.claimed)
		case unpublish:
			return in.held && v.published[in.target]
		case cutGroup:
			return in.held && s.groupA == absent && s.volumes[a].exists && s.volumes[b].exists
		case nodeExpand:
			return v.published[in.target] || v.staged || v.attached // ext4, without CAP_SYS_RESOURCE
		}
	}
	return false
}

func (in input) String() string {
	switch in.kind {
	case restart, observe:
		return string(in.kind)
	}
	return fmt.Sprintf("%s %c target %d number %d held %v", in.kind, 'a'+rune(in.volume), in.target, in.number, in.held)
}

func (out output) String() string {
	text := out.code.String()
	if out.maybe {
		text += " (maybe)"
	}
	return fmt.Sprintf("%s %d", text, out.number)
}

// empty is an environment of which nothing exists.
var empty = state{snapshot: absent, groupA: absent, groupB: absent}
