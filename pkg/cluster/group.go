package cluster

import (
	"context"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/kube"
)

// ByNode is the index of volumes, snapshots and pools by the node that has them (spec.nodeName).
const ByNode = "node"

// ByMove is the index of volumes and snapshots by the node that they move to, or have left (spec.move).
const ByMove = "move"

// ByGroup is the index of snapshots by the keys of their groups, which IndexGroup returns.
const ByGroup = "group"

// BySource is the index of snapshots by the keys of their volumes.
const BySource = "source"

// ByFetched is the index of volumes that are being copied from another node, by the key of their source.
const ByFetched = "fetched"

// IndexGroup is the client.IndexerFunc of ByGroup.
func IndexGroup(o client.Object) []string {
	if group := o.(*v1alpha1.Snapshot).Spec.Group; group != nil {
		return []string{group.Key}
	}
	return nil
}

// Members returns the snapshots of a group (v1alpha1.OfGroup). The client reads from a cache with the index
// ByGroup.
func Members(ctx context.Context, c client.Reader, key string) ([]v1alpha1.Snapshot, error) {
	var list v1alpha1.SnapshotList
	err := c.List(ctx, &list, client.MatchingFields{ByGroup: key})
	return v1alpha1.OfGroup(list.Items), kube.APIError("list the members of a group", err)
}

// LiveMembers is Members, but reads at the API server: the snapshots with the label of the group, and all snapshots if these are fewer than the group has.
func LiveMembers(ctx context.Context, live client.Client, key string) ([]v1alpha1.Snapshot, error) {
	members, err := liveMembers(ctx, live, key, client.MatchingLabels{v1alpha1.GroupLabel: key})
	if err == nil && (len(members) == 0 || len(members) < members[0].Spec.Group.Size) {
		members, err = liveMembers(ctx, live, key)
	}
	return v1alpha1.OfGroup(members), kube.APIError("list the members of a group", err)
}

// liveMembers returns the snapshots that say that they are of a group, among those that the API server lists with some options.
func liveMembers(ctx context.Context, live client.Client, key string, options ...client.ListOption) (members []v1alpha1.Snapshot, err error) {
	err = kube.EachPage(ctx, live, &v1alpha1.SnapshotList{}, func(list *v1alpha1.SnapshotList) {
		for i := range list.Items {
			if m := &list.Items[i]; m.Spec.Group != nil && m.Spec.Group.Key == key {
				members = append(members, *m.DeepCopy())
			}
		}
	}, options...)
	return members, err
}
