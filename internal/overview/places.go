package overview

import "slices"

// Places are the problems of nodes and pools, by subject.
type Places map[Subject][]Problem

// Places returns the problems of all nodes and pools. The overview has to be finished.
func (o *Overview) Places() Places {
	places := Places{}
	for _, p := range o.Problems {
		if p.Subject.Kind == KindNode || p.Subject.Kind == KindPool {
			places[p.Subject] = append(places[p.Subject], p)
		}
	}
	return places
}

// Around returns the problems of a node and one of its pools that affect all that is there, the worst first: those that make it unreachable (Inaccessible or
// worse), and AgentSilent. Others, as of a pool that is nearly full, do not affect the volumes in it.
func (p Places) Around(node, pool string) []Problem {
	var all []Problem
	for _, of := range []Subject{{KindPool, PoolName(node, pool)}, {KindNode, node}} {
		for _, one := range p[of] {
			if Worse(one.Severity, Inaccessible) <= 0 || one.Reason == AgentSilent {
				all = append(all, one)
			}
		}
	}
	sortWorst(all)
	return all
}

// around is Around for a volume. A volume with replicas has none as long as one current leg has none.
func (p Places) around(v *Volume) (all []Problem) {
	if v.Replicas == nil {
		return p.Around(v.Node, v.Pool)
	}
	for _, leg := range v.Replicas.Legs {
		if leg.State != LegCurrent {
			continue
		}
		around := p.Around(leg.Node, leg.Pool)
		if len(around) == 0 {
			return nil
		}
		for _, one := range around {
			if !slices.ContainsFunc(all, func(have Problem) bool { return have == one }) {
				all = append(all, one)
			}
		}
	}
	sortWorst(all)
	return all
}

// Of returns the problems of a volume, and those around it, the worst first. The latter are in Overview.Problems once, with the pool or node as their subject.
func (p Places) Of(v *Volume) []Problem {
	around := p.around(v)
	if len(around) == 0 {
		return v.Problems
	}
	all := slices.Concat(v.Problems, around)
	sortWorst(all)
	return all
}
