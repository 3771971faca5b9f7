package volume

import (
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
)

// SchemesHere are those that volumes on this machine can have, as its kernel and its programs are now.
func SchemesHere() []Scheme {
	if luks.Available() != nil {
		return nil
	}
	return []Scheme{LUKS2}
}

// Capacity is what a pool has for volumes of a scheme, of which it keeps more than their size.
func (s Scheme) Capacity(of blockdev.Capacity) blockdev.Capacity {
	of.MaxVolume = max(0, of.MaxVolume-s.Overhead())
	return of
}
