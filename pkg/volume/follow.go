package volume

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Placement says whether the bytes of a volume stay on their node, or move to the node that uses the volume.
type Placement string

// The placements.
const (
	PlacementStay   Placement = "stay"   // the default
	PlacementFollow Placement = "follow" // they move to the node that has used the volume for a while
)

// ParameterPlacement is the parameter with a Placement, which is mutable, and may be in a class.
const ParameterPlacement = "placement"

var placementParameter = mutableParameter{
	values: fmt.Sprintf("%s, %s", PlacementStay, PlacementFollow),
	means:  "whether the bytes of a volume with `access=any` move to the node where it has been used for a while ([more](../use/moving.md#bytes-that-follow-their-pod))",
	check: func(v string) error {
		if p := Placement(v); p != PlacementStay && p != PlacementFollow {
			return fmt.Errorf("%w: %s=%q; %s and %s are known", errdefs.ErrInvalid, ParameterPlacement, v, PlacementStay, PlacementFollow)
		}
		return nil
	},
}

// Follows reports whether mutable parameters, which were checked, have PlacementFollow.
func Follows(mutable map[string]string) bool {
	return Placement(mutable[ParameterPlacement]) == PlacementFollow
}

// CheckPlacement returns ErrInvalid for PlacementFollow if the volume cannot move like that: only its own node can use it, or it has replicas. replicas is
// Replicas.Legs.
func CheckPlacement(access Access, replicas int, mutable map[string]string) error {
	if Follows(mutable) && replicas > 0 {
		return fmt.Errorf("%w: parameter %s=%s is for volumes on one node, not for those with replicas", errdefs.ErrInvalid, ParameterPlacement, PlacementFollow)
	}
	if Follows(mutable) && access != AccessAny {
		return fmt.Errorf("%w: parameter %s=%s is for volumes that other nodes than their own can use; their class has access=%s", errdefs.ErrInvalid,
			ParameterPlacement, PlacementFollow, AccessAny)
	}
	return nil
}
