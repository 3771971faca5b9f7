// Package move is what the node that uses a volume says to the volume's two nodes, the old and the new one, when the volume moves meanwhile, over the agents' port. It
// knows nothing of who may ask.
package move

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/cluster/export"
	"github.com/ashlar-csi/ashlar/pkg/cluster/internal/call"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// Service is the name of the service, as a full method begins with it: /ashlar.v1.Move/Prepare.
const Service = "ashlar.v1.Move"

// Of says which move a call is for.
type Of struct {
	ID volume.ID
	// Claim is the generation of the caller's claim.
	Claim int64
	// Object is metadata.generation of the volume's object as the caller has read it: a call of a move that was taken back, and asked for anew since, is refused.
	Object int64
}

// Old is the node that has a volume, or had it, as the one sees it that uses it. Each call may be made again. errdefs.ErrBusy: something else is being done to the volume, which
// does not take long. errdefs.ErrPrecondition: the API server says that the volume does not move, or not while the caller uses it by that claim, or not in that
// generation of the object. errdefs.ErrUnavailable: that cannot be found out now.
type Old interface {
	// Describe begins the move: it returns what the new node has to know to make room. Created is when that was asked for; there are no Read and no seal, and what
	// was sealed for the caller is not any more.
	Describe(ctx context.Context, of Of) (volume.Origin, error)
	// Ranges are those that hold data: all else reads as zeros. The caller holds back its writes until it mirrors them.
	Ranges(ctx context.Context, of Of) ([]blockdev.Extent, error)
	// Seal seals the volume for the caller, which goes on with it: its record does not change from then on, and nobody else uses the volume before the API server
	// has said that it stays. Created is when it was sealed; Labels are those that the volume takes along.
	Seal(ctx context.Context, of Of) (volume.Origin, error)
	// Sealed is for the new node, once the volume has moved there: since when the old one has it sealed; zero if it has not. errdefs.ErrNotFound if it has not moved
	// there, or has arrived, or the old one has nothing of it.
	Sealed(ctx context.Context, id volume.ID) (time.Time, error)
}

// New is the node that a volume moves to, as the one sees it that uses the volume. Errors are those of Old, and errdefs.ErrNotFound for what was not prepared, or is not there any
// more.
type New interface {
	// Prepare makes room for the volume, which reads as zeros, and exports that to the caller for the generation after its claim. Asked again for the same description
	// it answers the same; what was prepared for an earlier one goes. A later one stays: ErrPrecondition.
	Prepare(ctx context.Context, of Of, from volume.Origin) (export.Opened, error)
	// Complete makes what was prepared all of the volume, durably: the caller has mirrored it there, and nothing is missing. nqn is that of the export which the caller
	// is connected to (volume.Exported); from is what was sealed.
	Complete(ctx context.Context, of Of, nqn string, from volume.Origin) error
	// Drop removes what was prepared, if it is exported by that name. What is gone is gone: success.
	Drop(ctx context.Context, of Of, nqn string) error
	// Arrived is for the old node, which is about to delete what it has: nil if the volume has moved from there, and the new one has all of it. errdefs.ErrNotFound,
	// errdefs.ErrDataLoss if not.
	Arrived(ctx context.Context, id volume.ID) error
}

// Home is the node that has a volume, as one sees it that the volume has left, and that was taken for gone until the move had ended.
type Home interface {
	// Has reports whether the node has the volume, whole, and that came from what the caller has sealed since a time: then it has all of that, and what was written since. It is false
	// as well where the API server does not say that the volume is that node's.
	Has(ctx context.Context, id volume.ID, sealed time.Time) (bool, error)
}

const (
	methodDescribe = "Describe"
	methodRanges   = "Ranges"
	methodSeal     = "Seal"
	methodSealed   = "Sealed"
	methodPrepare  = "Prepare"
	methodComplete = "Complete"
	methodDrop     = "Drop"
	methodArrived  = "Arrived"
	methodHas      = "Has"
)

// request is that of each of the calls.
type request struct {
	Volume string  `json:"volume"`
	Claim  int64   `json:"claim"`
	Object int64   `json:"object"`
	NQN    string  `json:"nqn,omitempty"`
	Origin *origin `json:"origin,omitempty"`

	Sealed time.Time `json:"sealed,omitzero"` // of Has
}

// Of: see call.Request.
func (r request) Of() string { return r.Volume }

// of is which move it is for.
func (r request) of(id volume.ID) Of { return Of{id, r.Claim, r.Object} }

// answer is that to each of the calls. Complete, Drop and Arrived have an empty one.
type answer struct {
	Origin *origin      `json:"origin,omitempty"`
	Opened *export.Wire `json:"opened,omitempty"`
	Ranges []extent     `json:"ranges,omitempty"`
	Since  time.Time    `json:"since,omitzero"` // of Sealed
	Has    bool         `json:"has,omitempty"`  // of Has
}

type extent struct {
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// origin is a volume.Origin of a move.
type origin struct {
	ID      string             `json:"id"`
	Pool    string             `json:"pool,omitempty"`
	Created time.Time          `json:"created"`
	Size    int64              `json:"size"`
	Sector  int64              `json:"sector"`
	Carries filesystem.Type    `json:"filesystem,omitempty"`
	Scheme  volume.Scheme      `json:"encryption,omitempty"`
	State   volume.FormatState `json:"state,omitempty"`
	Type    filesystem.Type    `json:"type,omitempty"`
	Header  volume.FormatState `json:"header,omitempty"`
	UUID    string             `json:"headerUUID,omitempty"`
	Labels  map[string]string  `json:"labels,omitempty"`
	Claims  int64              `json:"claims,omitempty"`
}

func fromOrigin(o volume.Origin) *origin {
	return &origin{o.ID.String(), o.Pool, o.Created, o.Size, o.Sector, o.Filesystem, o.Scheme, o.Format.State, o.Format.Type, o.Header.State, o.Header.UUID, o.Labels, o.Claims}
}

// of is the origin of a volume, as another node says it: what it says is not looked at yet.
func (o *origin) of(id volume.ID) (volume.Origin, error) {
	if o == nil || o.ID != id.String() || o.Created.IsZero() || o.Size <= 0 {
		return volume.Origin{}, fmt.Errorf("%w: what came does not say what volume %s is", errdefs.ErrUnavailable, id)
	}
	labels := o.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	return volume.Origin{ID: id, Pool: o.Pool, Created: o.Created, Size: o.Size, Sector: o.Sector, Contents: volume.Contents{Filesystem: o.Carries, Scheme: o.Scheme},
		Format: volume.Format{State: o.State, Type: o.Type}, Header: volume.Header{State: o.Header, UUID: o.UUID}, Labels: labels, Claims: o.Claims}, nil
}

// Register has a gRPC server answer for a node, as the old one of volumes that move, as the new one of others, and as the one that others have moved to.
func Register(r grpc.ServiceRegistrar, from Old, to New, at Home) {
	originOf := func(o volume.Origin, err error) (answer, error) { return answer{Origin: fromOrigin(o)}, err }
	methods := map[string]func(context.Context, volume.ID, request) (answer, error){
		methodDescribe: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			return originOf(from.Describe(ctx, r.of(id)))
		},
		methodSeal: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			return originOf(from.Seal(ctx, r.of(id)))
		},
		methodSealed: func(ctx context.Context, id volume.ID, _ request) (answer, error) {
			since, err := from.Sealed(ctx, id)
			return answer{Since: since}, err
		},
		methodHas: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			has, err := at.Has(ctx, id, r.Sealed)
			return answer{Has: has}, err
		},
		methodRanges: func(ctx context.Context, id volume.ID, r request) (out answer, err error) {
			ranges, err := from.Ranges(ctx, r.of(id))
			for _, e := range ranges {
				out.Ranges = append(out.Ranges, extent(e))
			}
			return out, err
		},
		methodPrepare: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			described, err := r.Origin.of(id)
			if err != nil {
				return answer{}, err
			}
			o, err := to.Prepare(ctx, r.of(id), described)
			return answer{Opened: export.WireOf(o)}, err
		},
		methodComplete: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			sealed, err := r.Origin.of(id)
			if err != nil {
				return answer{}, err
			}
			return answer{}, to.Complete(ctx, r.of(id), r.NQN, sealed)
		},
		methodDrop: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			return answer{}, to.Drop(ctx, r.of(id), r.NQN)
		},
		methodArrived: func(ctx context.Context, id volume.ID, _ request) (answer, error) {
			return answer{}, to.Arrived(ctx, id)
		},
	}
	r.RegisterService(&grpc.ServiceDesc{ServiceName: Service, HandlerType: (*any)(nil), Methods: call.Methods(Service, methods)}, nil)
}

// OldAt is the old node that answers at a connection.
func OldAt(agent grpc.ClientConnInterface) Old { return client{agent} }

// NewAt is the new node that answers at a connection.
func NewAt(agent grpc.ClientConnInterface) New { return client{agent} }

// HomeAt is the node that has a volume, which answers at a connection.
func HomeAt(agent grpc.ClientConnInterface) Home { return client{agent} }

type client struct{ agent grpc.ClientConnInterface }

func (c client) call(ctx context.Context, method string, of Of, r request) (out answer, err error) {
	r.Volume, r.Claim, r.Object = of.ID.String(), of.Claim, of.Object
	err = call.Ask(ctx, c.agent, Service, method, r, &out)
	if errors.Is(err, errdefs.ErrInUse) { // gRPC has one code for both
		err = errdefs.Recast(errdefs.ErrPrecondition, err, "%s of the move of volume %s", method, r.Volume)
	}
	return out, err
}

// Describe: see Old.
func (c client) Describe(ctx context.Context, of Of) (volume.Origin, error) {
	out, err := c.call(ctx, methodDescribe, of, request{})
	if err != nil {
		return volume.Origin{}, err
	}
	return out.Origin.of(of.ID)
}

// Ranges: see Old.
func (c client) Ranges(ctx context.Context, of Of) (ranges []blockdev.Extent, err error) {
	out, err := c.call(ctx, methodRanges, of, request{})
	for _, e := range out.Ranges {
		ranges = append(ranges, blockdev.Extent(e))
	}
	return ranges, err
}

// Seal: see Old.
func (c client) Seal(ctx context.Context, of Of) (volume.Origin, error) {
	out, err := c.call(ctx, methodSeal, of, request{})
	if err != nil {
		return volume.Origin{}, err
	}
	return out.Origin.of(of.ID)
}

// Sealed: see Old.
func (c client) Sealed(ctx context.Context, id volume.ID) (time.Time, error) {
	out, err := c.call(ctx, methodSealed, Of{ID: id}, request{})
	return out.Since, err
}

// Prepare: see New.
func (c client) Prepare(ctx context.Context, of Of, from volume.Origin) (export.Opened, error) {
	out, err := c.call(ctx, methodPrepare, of, request{Origin: fromOrigin(from)})
	if err != nil {
		return export.Opened{}, err
	}
	return out.Opened.Of(of.ID)
}

// Complete: see New.
func (c client) Complete(ctx context.Context, of Of, nqn string, from volume.Origin) error {
	_, err := c.call(ctx, methodComplete, of, request{NQN: nqn, Origin: fromOrigin(from)})
	return err
}

// Drop: see New.
func (c client) Drop(ctx context.Context, of Of, nqn string) error {
	_, err := c.call(ctx, methodDrop, of, request{NQN: nqn})
	return err
}

// Arrived: see New.
func (c client) Arrived(ctx context.Context, id volume.ID) error {
	_, err := c.call(ctx, methodArrived, Of{ID: id}, request{})
	return err
}

// Has: see Home.
func (c client) Has(ctx context.Context, id volume.ID, sealed time.Time) (bool, error) {
	out, err := c.call(ctx, methodHas, Of{ID: id}, request{Sealed: sealed})
	return out.Has, err
}
