package cluster

import (
	"maps"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func volumeID(v *v1alpha1.Volume) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: v.Spec.Pool, Key: v.Name}
}

func snapshotID(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Snapshot, Pool: s.Spec.Pool, Key: s.Name}
}

func sourceOf(v *v1alpha1.Volume) volume.ID {
	if v.Spec.Source == nil {
		return volume.ID{}
	}
	return volume.ID{Kind: blockdev.Kind(v.Spec.Source.Kind), Pool: v.Spec.Pool, Key: v.Spec.Source.Key}
}

func requesterOf(v *v1alpha1.Volume) volume.Requester {
	who := volume.Requester{PersistentVolume: v.Spec.PersistentVolume}
	if ref := v.Spec.ClaimRef; ref != nil {
		who.Namespace, who.Name = ref.Namespace, ref.Name
	}
	return who
}

// toVolume is an object as the domain sees it: as it is once the node has made it, and
// as it will be before. The format is known to the node alone.
func toVolume(v *v1alpha1.Volume) volume.Volume {
	out := volume.Volume{ID: volumeID(v), Name: v.Spec.Name, Size: v.Spec.Size, Thin: v.Spec.Provisioning == string(blockdev.Thin), Source: sourceOf(v),
		Filesystem: filesystem.Type(v.Spec.Filesystem), Mutable: map[string]string{}, Node: v.Spec.NodeName}
	maps.Copy(out.Mutable, v.Spec.Mutable)
	if v.Status.Created != nil {
		out.Size, out.Thin, out.Created = v.Status.Size, v.Status.Thin, v.Status.Created.Time
		out.Mutable = map[string]string{}
		maps.Copy(out.Mutable, v.Status.Mutable)
	}
	out.For = requesterOf(v)
	if c := v.Spec.Claim; c != nil {
		out.Claim = volume.Claim{Node: c.Node, ReadOnly: c.ReadOnly, Mode: c.Mode}
	}
	return out
}

// memberName is what Local calls a member of a group.
func memberName(group string, source volume.ID) string { return group + "\x00" + source.String() }

func snapshotSource(s *v1alpha1.Snapshot) volume.ID {
	return volume.ID{Kind: blockdev.Volume, Pool: s.Spec.Pool, Key: s.Spec.Source}
}

func toSnapshot(s *v1alpha1.Snapshot) volume.Snapshot {
	out := volume.Snapshot{ID: snapshotID(s), Name: s.Spec.Name, Source: snapshotSource(s), Size: s.Status.Size, Node: s.Spec.NodeName}
	if s.Status.Created != nil {
		out.Created = s.Status.Created.Time
	}
	if g := s.Spec.Group; g != nil {
		out.Group, out.Name = volume.GroupID{Key: g.Key}, memberName(s.Spec.Name, out.Source)
	}
	return out
}

var severities = map[string]blockdev.Severity{"Degraded": blockdev.Degraded, "Inaccessible": blockdev.Inaccessible, "DataLoss": blockdev.DataLoss}

func toProblems(health []v1alpha1.Problem) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, p := range health {
		problems = append(problems, blockdev.Problem{Severity: severities[p.Severity], Reason: p.Reason, Message: p.Message})
	}
	return problems
}

func fromProblems(problems []blockdev.Problem) []v1alpha1.Problem {
	var health []v1alpha1.Problem
	for _, p := range problems {
		for word, severity := range severities {
			if severity == p.Severity {
				health = append(health, v1alpha1.Problem{Severity: word, Reason: p.Reason, Message: strings.ToValidUTF8(p.Message, "?")})
			}
		}
	}
	return health
}

func compareIDs(a, b volume.ID) int {
	if c := strings.Compare(a.Pool, b.Pool); c != 0 {
		return c
	}
	return strings.Compare(a.Key, b.Key)
}
