package volume

import (
	"fmt"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Placement says whether the bytes of a volume stay where they are.
type Placement string

// The placements that there are.
const (
	PlacementStay   Placement = "stay"   // as without the parameter
	PlacementFollow Placement = "follow" // they move to the node that has used the volume for a while
)

// ParameterPlacement is the mutable parameter, and that of a class, that has a Placement.
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

// Follows reports whether mutable parameters, which were checked, say that a volume is to be where it is used.
func Follows(mutable map[string]string) bool {
	return Placement(mutable[ParameterPlacement]) == PlacementFollow
}

// CheckPlacement is ErrInvalid for a volume that is to be where it is used, and can be used on its own node alone, or has replicas on several.
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
