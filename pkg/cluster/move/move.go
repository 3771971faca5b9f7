// Package move is the protocol of moves of volumes in use, over the agents' port: what the consumer, the old home and the new home ask of each other. It does
// not check who may ask.
package move

import (
	"context"
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
	// Object is metadata.generation of the volume's object as the caller has read it. So a late call is refused if its move was undone and requested anew
	// since.
	Object int64
}

// Old is the old home of a volume that moves. Each call may be repeated. The errors of all calls:
//
//   - errdefs.ErrBusy: something else is being done to the volume, for a short time;
//   - errdefs.ErrPrecondition: the API server says that the volume does not move, not while it is used by that claim, or not in that generation of the object;
//   - errdefs.ErrUnavailable: the node cannot find that out now, or the volume has to grow first.
type Old interface {
	// Describe begins the move. It returns what the new home needs to make room; Created is the time of this call, and there is no Read. A seal for the
	// caller is taken off.
	Describe(ctx context.Context, of Of) (volume.Origin, error)
	// Ranges returns the ranges that hold data: all else reads as zeros. The caller has to hold back its writes from before this call until it mirrors them.
	Ranges(ctx context.Context, of Of) ([]blockdev.Extent, error)
	// Seal seals the volume for the caller, which goes on using it. From then on its record does not change, and nobody else uses the volume until the API
	// server says that it stays. Created is when it was sealed; Labels are those that the volume takes along.
	Seal(ctx context.Context, of Of) (volume.Origin, error)
	// Sealed is called by the new home once the volume has moved there. It returns since when the old home has it sealed; zero: it has not.
	// errdefs.ErrNotFound if the volume has not moved there, has arrived, or the old home has nothing of it.
	Sealed(ctx context.Context, id volume.ID) (time.Time, error)
}

// New is the new home of a volume that moves. Errors are those of Old, and errdefs.ErrNotFound for what was not prepared, or is not there any more.
type New interface {
	// Prepare makes a copy of the volume that reads as zeros, and exports it to the caller for the generation after its claim. from is what Describe
	// returned. With the same from it may be repeated; what was prepared for an earlier one is removed. errdefs.ErrPrecondition if something was prepared
	// for a later one.
	Prepare(ctx context.Context, of Of, from volume.Origin) (export.Opened, error)
	// Complete records durably that what was prepared is the whole volume. The caller has copied and mirrored everything there before. nqn is that of the
	// export which the caller is connected to (volume.Exported); from is what Seal returned.
	Complete(ctx context.Context, of Of, nqn string, from volume.Origin) error
	// Drop removes what was prepared, if it is exported by that name. It succeeds if there is nothing to remove.
	Drop(ctx context.Context, of Of, nqn string) error
	// Arrived is called by the old home before it deletes its bytes. It is nil if the volume has moved from there, and the new home has all of it; else
	// errdefs.ErrNotFound or errdefs.ErrDataLoss.
	Arrived(ctx context.Context, id volume.ID) error
	// Took is called by the node that the volume is on, as the API server says, before it breaks the seal that it made for this node at a time. It reports
	// whether the volume has moved here by that seal all the same, so that only this node has what was written since: the API server was restored
	// (volume.HasTaken). errdefs.ErrUnknownCall from an older driver.
	Took(ctx context.Context, id volume.ID, sealed time.Time) (bool, error)
}

// Home is the node that has a volume. It is asked by a node that the volume has left, and that counted as gone while the move ended.
type Home interface {
	// Has reports whether the node has the whole volume, and that came from what the caller has had sealed since that time. Then the node has all that the
	// caller has, and what was written since. It is false too if the API server does not say that the volume is on that node.
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
	methodTook     = "Took"
)

// request is the request of each call.
type request struct {
	Volume string  `json:"volume"`
	Claim  int64   `json:"claim"`
	Object int64   `json:"object"`
	NQN    string  `json:"nqn,omitempty"`
	Origin *origin `json:"origin,omitempty"`

	Sealed time.Time `json:"sealed,omitzero"` // of Has and Took
}

// Of: see call.Request.
func (r request) Of() string { return r.Volume }

// of returns which move a request is for.
func (r request) of(id volume.ID) Of { return Of{id, r.Claim, r.Object} }

// answer is the answer to each call. Those to Complete, Drop and Arrived are empty.
type answer struct {
	Origin *origin      `json:"origin,omitempty"`
	Opened *export.Wire `json:"opened,omitempty"`
	Ranges []extent     `json:"ranges,omitempty"`
	Since  time.Time    `json:"since,omitzero"` // of Sealed
	Has    bool         `json:"has,omitempty"`  // of Has and Took
}

type extent struct {
	Offset int64 `json:"offset"`
	Length int64 `json:"length"`
}

// origin is a volume.Origin of a move, as JSON.
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

// of returns the origin of a volume that another node has sent; ErrUnavailable if it is of another volume, or has no time or size. The rest is not checked
// here.
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

// Register has a gRPC server answer for a node: as the old home of volumes (from), as the new home (to), and as the home of volumes that have moved (at).
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
		methodTook: func(ctx context.Context, id volume.ID, r request) (answer, error) {
			took, err := to.Took(ctx, id, r.Sealed)
			return answer{Has: took}, err
		},
		methodArrived: func(ctx context.Context, id volume.ID, _ request) (answer, error) {
			return answer{}, to.Arrived(ctx, id)
		},
	}
	r.RegisterService(&grpc.ServiceDesc{ServiceName: Service, HandlerType: (*any)(nil), Methods: call.Methods(Service, methods)}, nil)
}

// OldAt returns the old home that answers at a connection.
func OldAt(agent grpc.ClientConnInterface) Old { return client{agent} }

// NewAt returns the new home that answers at a connection.
func NewAt(agent grpc.ClientConnInterface) New { return client{agent} }

// HomeAt returns the home that answers at a connection.
func HomeAt(agent grpc.ClientConnInterface) Home { return client{agent} }

type client struct{ agent grpc.ClientConnInterface }

func (c client) call(ctx context.Context, method string, of Of, r request) (out answer, err error) {
	r.Volume, r.Claim, r.Object = of.ID.String(), of.Claim, of.Object
	err = call.Ask(ctx, c.agent, Service, method, r, &out)
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

// Took: see New.
func (c client) Took(ctx context.Context, id volume.ID, sealed time.Time) (bool, error) {
	out, err := c.call(ctx, methodTook, Of{ID: id}, request{Sealed: sealed})
	return out.Has, err
}

// Has: see Home.
func (c client) Has(ctx context.Context, id volume.ID, sealed time.Time) (bool, error) {
	out, err := c.call(ctx, methodHas, Of{ID: id}, request{Sealed: sealed})
	return out.Has, err
}
