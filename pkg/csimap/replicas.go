package csimap

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

const (
	// mostReplicas is how many nodes can have the bytes of a volume at once.
	mostReplicas = 3
	// maxLabelKey is the longest key of a label, in bytes: a prefix of 253, and a name of 63.
	maxLabelKey = 317
)

// replicate reads a parameter of volumes with several legs.
func (p *Parameters) replicate(key, value string) error {
	switch key {
	case replicas:
		n, err := strconv.Atoi(value)
		if err != nil || n < 1 || n > mostReplicas || value != strconv.Itoa(n) {
			return fmt.Errorf("%w: parameter %s=%q; 1 to %d can be had", errdefs.ErrInvalid, key, value, mostReplicas)
		}
		p.Replicas.Count = n
	case replicaTopologyKey:
		if value == "" || len(value) > maxLabelKey || strings.ContainsAny(value, " \t\n,=") {
			return fmt.Errorf("%w: parameter %s=%q; give the key of a label of nodes, as topology.kubernetes.io/zone", errdefs.ErrInvalid, key, value)
		}
		p.Replicas.TopologyKey = value
	case replaceAfter:
		d, err := time.ParseDuration(value)
		if err != nil || d < 0 || d%time.Second != 0 {
			return fmt.Errorf("%w: parameter %s=%q; give whole seconds, as 90s or 10m, or 0 for never", errdefs.ErrInvalid, key, value)
		}
		p.Replicas.ReplaceAfter = d
	}
	return nil
}

// checkReplicas is ErrInvalid for parameters of a volume with several legs that mean nothing without others. One that does not say when its legs are replaced gets the usual time.
func (p *Parameters) checkReplicas(parameters map[string]string) error {
	if p.Replicas.Legs() == 0 {
		for _, key := range []string{replicaTopologyKey, replaceAfter} {
			if value, given := parameters[key]; given {
				return fmt.Errorf("%w: parameter %s=%q is for volumes with more than one replica; give %s too", errdefs.ErrInvalid, key, value, replicas)
			}
		}
		return nil
	}
	if p.Access != volume.AccessAny {
		return fmt.Errorf("%w: parameter %s=%d is for volumes that other nodes than their own can use; give %s=%s too", errdefs.ErrInvalid, replicas, p.Replicas.Count, access, volume.AccessAny)
	}
	if _, given := parameters[replaceAfter]; !given {
		p.Replicas.ReplaceAfter = volume.UsualReplaceAfter
	}
	return nil
}
