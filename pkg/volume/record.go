package volume

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
)

// Labels that the record of a volume or snapshot carries for this package.
const (
	labelFilesystem = "fs"
	labelFormat     = "format" // STATE or STATE:TYPE
	labelClaimNode  = "claim.node"
	labelClaimMode  = "claim.mode"
	labelClaimRO    = "claim.readonly"
	labelEphemeral  = "ephemeral"
	labelTarget     = "target"
	labelFlags      = "flags"
	labelEncryption = "encryption"
	labelDiscards   = "encryption.discard"
	labelHeader     = "header"   // STATE or STATE:UUID, of an encrypted volume
	labelSeparate   = "separate" // of a copy of an encrypted volume: the filesystem behind its header may still have the identity of that of the source
	labelAccess     = "access"
	labelTimeout    = "home.timeout"
	labelReplicaOf  = "replica.of" // the key of the volume that it is a leg of
	labelLeg        = "leg"        // of a leg: see LegState
	labelBoot       = "boot"       // in no record: the boot ID of its machine, which a home tells the consumer of a leg
	labelFrozen     = "frozen"     // this driver may have frozen its filesystem, for a copy
	labelGroup      = "group"
	labelGroupSize  = "group.size"
	labelGroupWhole = "group.whole" // the group was complete once: a member that is missing was lost
	labelMutable    = "mutable."    // and the name of a mutable parameter, which has this value
	labelPool       = "pool"        // the pool that the ID names, if that is not the pool of the record
	labelSource     = "source"      // ID of the source, if that names another pool, or is of a volume with several legs; and of all that has moved
	labelImport     = "import"      // of an unfinished copy: see importLabel
	labelCutFor     = "cut.for"     // of a hidden snapshot: the key of the copy in another pool that it was cut for; its own key if it moves here
	labelExport     = "export"      // its export, until that has ended: see export
	labelRead       = "read"        // read by many nodes: see reading
	labelSealed     = "sealed"      // its seal, while it moves to another node: see Seal
	labelSealedFor  = "sealed.for"  // the node that it was sealed for: see Sealing
	labelLeft       = "left"        // the node that it has moved to: see Left
	labelTold       = "told"        // the last time of a seal or a description that others were told: see sealTime
	labelCarried    = "carried"     // of a copy that was completed while the volume was in use: see carriedLabel
	labelMarks      = "marks"       // whether all that was written to a leg is marked: see marking
	labelMade       = "made"        // of what has moved: when it was made or cut
	labelCame       = "came"        // the seals by which it has moved: see came
	labelObject     = "object"      // the UID of the object that it was made for: see Volume.Object
	labelNamespace  = "pvc.namespace"
	labelClaim      = "pvc.name"
	labelPV         = "pv.name"
)

func setLabel(labels map[string]string, key, value string) {
	if value == "" {
		delete(labels, key)
	} else {
		labels[key] = value
	}
}

// fromRecord returns the volume of a record.
func fromRecord(pool, node string, r blockdev.Record) Volume {
	v := Volume{ID: IDOf(pool, r), Pool: pool, Name: r.Name, Size: sizeOf(r), Thin: r.Thin, Source: sourceOf(pool, r), Node: node, Created: r.Created,
		Filesystem: filesystem.Type(r.Labels[labelFilesystem]), Format: parseFormat(r.Labels[labelFormat]),
		Encryption: Encryption{schemeOf(r), r.Labels[labelDiscards] != ""}, Header: parseHeader(r.Labels[labelHeader]),
		Access: Access(r.Labels[labelAccess]), HomeTimeout: homeTimeoutOf(r.Labels[labelTimeout]), ReplicaOf: r.Labels[labelReplicaOf],
		separate:  r.Labels[labelSeparate] != "",
		Claim:     Claim{Node: r.Labels[labelClaimNode], ReadOnly: r.Labels[labelClaimRO] != "", Mode: r.Labels[labelClaimMode]},
		Ephemeral: r.Labels[labelEphemeral], Target: r.Labels[labelTarget], Flags: r.Labels[labelFlags], Mutable: map[string]string{},
		For: Requester{r.Labels[labelNamespace], r.Labels[labelClaim], r.Labels[labelPV]}}
	if e, is, err := exportOf(r); is && err == nil {
		v.Exported = e.Grant
	}
	v.Read = r.Labels[labelRead] != ""
	v.Sealed = r.Labels[labelSealed] != ""
	s, _ := sealOf(r)
	v.Kept = s.claims == keptClaims
	v.Left = r.Labels[labelLeft]
	v.Stale = r.Stale
	v.Object = r.Labels[labelObject]
	if made, err := time.Parse(time.RFC3339Nano, r.Labels[labelMade]); err == nil {
		v.Created = made
	}
	for key, value := range r.Labels {
		if name, ok := strings.CutPrefix(key, labelMutable); ok {
			v.Mutable[name] = value
		}
	}
	return v
}

func snapshotFromRecord(pool, node string, r blockdev.Record) Snapshot {
	s := Snapshot{ID: IDOf(pool, r), Name: r.Name, Source: sourceOf(pool, r),
		Size: sizeOf(r), Scheme: schemeOf(r), Created: r.Created, Group: GroupID{r.Labels[labelGroup]}, Object: r.Labels[labelObject], Node: node}
	s.GroupSize, _ = strconv.Atoi(r.Labels[labelGroupSize])
	if cut, err := time.Parse(time.RFC3339Nano, r.Labels[labelMade]); err == nil {
		s.Created = cut
	}
	return s
}

// labels returns the labels of a new volume.
func (s Spec) labels() map[string]string {
	labels := map[string]string{}
	setLabel(labels, labelFilesystem, string(s.Filesystem))
	setLabel(labels, labelEncryption, string(s.Encryption.Scheme))
	if s.Encryption.Discards {
		labels[labelDiscards] = "true"
	}
	setLabel(labels, labelAccess, string(s.Access))
	setLabel(labels, labelTimeout, homeTimeoutLabel(s.HomeTimeout))
	setLabel(labels, labelReplicaOf, s.ReplicaOf)
	if s.ReplicaOf != "" && s.Source == (ID{}) {
		labels[labelMarks] = never
	}
	setLabel(labels, labelEphemeral, s.Ephemeral)
	setLabel(labels, labelObject, s.Object)
	setLabel(labels, labelNamespace, s.For.Namespace)
	setLabel(labels, labelClaim, s.For.Name)
	setLabel(labels, labelPV, s.For.PersistentVolume)
	for key, value := range s.Mutable {
		labels[labelMutable+key] = value
	}
	return labels
}

// changeLabel sets a label of an object. An empty value deletes it.
func changeLabel(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, label, value string) error {
	_, err := pool.SetLabels(ctx, ref, func(labels map[string]string) error {
		setLabel(labels, label, value)
		return nil
	})
	return err
}

func (l *Local) setLabels(ctx context.Context, id ID, change func(map[string]string) error) error {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return err
	}
	_, err = l.changeLabels(ctx, pool, ref, change)
	return err
}

// changeLabels is pool.SetLabels for a volume. The record of one that is sealed for its consumer changes only if the volume stays: the seal is ended
// first.
func (l *Local) changeLabels(ctx context.Context, pool blockdev.Pool, ref blockdev.Ref, change func(map[string]string) error) (record blockdev.Record, err error) {
	for range 2 {
		used := false
		var id ID
		record, err = pool.SetLabels(ctx, ref, func(labels map[string]string) error {
			now := blockdev.Record{Ref: ref, Labels: labels}
			s, err := sealOf(now)
			if used = err == nil && s.used != 0; used {
				id = IDOf(pool.Name(), now)
				return fmt.Errorf("%w: volume %s is about to move", errdefs.ErrUnavailable, ref.Key)
			}
			return change(labels)
		})
		if !used {
			break
		}
		if err := l.Unseal(ctx, id); err != nil {
			return record, err
		}
	}
	return record, err
}

// SetTarget records durably the only path that a volume may be published at; empty: any.
func (l *Local) SetTarget(ctx context.Context, id ID, target string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelTarget, target)
		return nil
	})
}

// SetFlags records durably what stands for the mount flags that a volume is staged with.
func (l *Local) SetFlags(ctx context.Context, id ID, flags string) error {
	return l.setLabels(ctx, id, func(labels map[string]string) error {
		setLabel(labels, labelFlags, flags)
		return nil
	})
}

// recordAt returns the record that a pool has of a volume, also if that is only left of a move.
func (l *Local) recordAt(ctx context.Context, at place) (blockdev.Pool, blockdev.Record, error) {
	pool, err := l.pool(at.pool)
	if err != nil {
		return nil, blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, at.id.ref())
	return pool, record, err
}

// anyRecord returns the record of a volume with all labels, also of an unfinished copy.
func (l *Local) anyRecord(ctx context.Context, id ID) (blockdev.Pool, blockdev.Record, error) {
	pool, ref, err := l.object(id, blockdev.Volume)
	if err != nil {
		return nil, blockdev.Record{}, err
	}
	record, err := pool.Get(ctx, ref)
	return pool, record, err
}

// finishedRecord is anyRecord; ErrNotFound for an unfinished copy.
func (l *Local) finishedRecord(ctx context.Context, id ID) (blockdev.Pool, blockdev.Record, error) {
	pool, record, err := l.anyRecord(ctx, id)
	if err == nil && unfinished(record) {
		err = fmt.Errorf("%w: volume %s is being copied", errdefs.ErrNotFound, id)
	}
	return pool, record, err
}
